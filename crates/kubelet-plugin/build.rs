//! Generates the gRPC code from `proto/`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    let files = protox::compile(["proto/deviceplugin.proto", "proto/podresources.proto"], ["proto"])?;
    tonic_prost_build::configure().build_transport(false).compile_fds(files)?;
    Ok(())
}
