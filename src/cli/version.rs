//! `version`: prints the versions of the program, the driver and CUDA, without asking NVML.

use std::path::Path;
use std::process::ExitCode;

use nvidia_host::config;
use nvidia_host::host::{self, Versions};

use super::{VERSION, output};

/// Prints the versions. The driver's is omitted if config.toml is invalid, because the driver root is then unknown.
pub(super) fn run(config: Option<&Path>) -> ExitCode {
    let versions = config::read(config)
        .ok()
        .map(|(config, _)| host::versions(&config));
    output::print(
        &(VERSION.to_owned() + &versions.map(|versions| text(&versions)).unwrap_or_default()),
    )
}

fn text(versions: &Versions) -> String {
    let Versions {
        driver,
        mismatch,
        cuda,
    } = versions;
    if let Some((module, libraries)) = mismatch {
        return format!("NVIDIA kernel module {module}, libraries {libraries} (ONH-013)\n");
    }
    let driver = driver.as_ref().map_or_else(
        || "NVIDIA driver not found\n".to_owned(),
        |v| format!("NVIDIA driver {v}\n"),
    );
    driver
        + &cuda
            .as_ref()
            .map(|v| format!("CUDA {v}\n"))
            .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_versions() {
        let known = |driver: Option<&str>, cuda: Option<&str>| {
            text(&Versions {
                driver: driver.map(str::to_owned),
                mismatch: None,
                cuda: cuda.map(str::to_owned),
            })
        };
        assert_eq!(
            known(Some("535.183.01"), Some("12.2")),
            "NVIDIA driver 535.183.01\nCUDA 12.2\n"
        );
        assert_eq!(
            known(Some("535.183.01"), None),
            "NVIDIA driver 535.183.01\n"
        );
        assert_eq!(known(None, None), "NVIDIA driver not found\n");
        let versions = Versions {
            mismatch: Some(("550.1".to_owned(), "535.1".to_owned())),
            ..Versions::default()
        };
        let both = "NVIDIA kernel module 550.1, libraries 535.1 (ONH-013)\n";
        assert_eq!(text(&versions), both);
    }
}
