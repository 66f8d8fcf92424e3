//! Generates the code of gRPC and of messages from `proto/`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    let protos = ["proto/deviceplugin.proto", "proto/podresources.proto", "proto/nri.proto", "proto/ttrpc.proto"];
    let files = protox::compile(protos, ["proto"])?;
    tonic_prost_build::configure().build_transport(false).compile_fds(files)?;
    Ok(())
}
