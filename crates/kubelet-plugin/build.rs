//! Generates the code of gRPC and of messages from `proto/`, and makes release builds smaller.
#![allow(
    clippy::disallowed_methods,
    reason = "these rules are for the program, not for a build"
)]

#[path = "../../packaging/linker.rs"]
mod linker;

/// The linker script of the hook's feature `lean`.
const SCRIPT: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../packaging/no-unwind-tables.ld"
);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    println!("cargo::rerun-if-changed={SCRIPT}");
    let out = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
    let protos = [
        "proto/deviceplugin.proto",
        "proto/podresources.proto",
        "proto/nri.proto",
        "proto/ttrpc.proto",
        "proto/pluginregistration.proto",
        "proto/dra_v1beta1.proto",
    ];
    generate(&protos, &out)?;
    // The package of the kubelet's pod resources is "v1" too, so that both would be in one file.
    let health = out.join("health");
    std::fs::create_dir_all(&health)?;
    generate(&["proto/dra_health_v1.proto"], &health)?;
    println!("cargo::rustc-link-arg-bins={}", linker::BUILD_ID);
    // A fifth of the program. Debug builds keep the tables for backtraces.
    if std::env::var("PROFILE").as_deref() == Ok("release") {
        linker::options(SCRIPT)
            .iter()
            .for_each(|option| println!("cargo::rustc-link-arg-bins={option}"));
    }
    Ok(())
}

fn generate(protos: &[&str], out: &std::path::Path) -> Result<(), Box<dyn std::error::Error>> {
    let files = protox::compile(protos, ["proto"])?;
    tonic_prost_build::configure()
        .build_transport(false)
        .out_dir(out)
        .compile_fds(files)?;
    Ok(())
}
