//! Checks the device plugin for Kubernetes, and the health of the GPUs that it reports to the kubelet.

use findings::catalog;

use super::check::{Check, count};
use super::facts::Facts;
use plugin_api::control::{Offered, OfferedDriver, Unanswered};
use plugin_api::status::Idle;

pub(super) fn check(facts: &Facts) -> Check {
    let Some(plugin) = &facts.kubelet_plugin else {
        return Check::skipped("the kubelet plugin is not installed");
    };
    if let Some(Ok(Offered {
        driver: Some(driver),
        ..
    })) = &facts.offered
    {
        return claims(driver, facts.offered.as_ref());
    }
    let Some(idle) = plugin.idle() else {
        let names = plugin
            .sockets
            .iter()
            .filter_map(|path| path.file_name())
            .map(|name| name.display().to_string());
        let served = Served {
            program: "the kubelet plugin".to_owned(),
            what: names.collect::<Vec<_>>().join(", "),
        };
        return serving(&served, facts.offered.as_ref());
    };
    match idle {
        Idle::Hidden => Check::skipped(idle.to_string()),
        Idle::NoKubelet => Check::skipped(format!("the kubelet plugin is installed, and {idle}")),
        Idle::Other(_) => Check::of(
            &catalog::OTHER_PLUGIN,
            format!("{idle}, and ours does not run"),
            idle.fix(),
        ),
        Idle::NotRunning => Check::of(
            &catalog::PLUGIN_NOT_RUNNING,
            format!("the kubelet plugin is installed, but {idle}"),
            idle.fix(),
        ),
    }
}

/// Checks a driver for claims, which has no socket among the device plugins' sockets.
fn claims(driver: &OfferedDriver, offered: Option<&Result<Offered, Unanswered>>) -> Check {
    let OfferedDriver {
        name,
        is_registered,
        problem,
        unpublished,
    } = driver;
    let check = "run \"oci-nvidia-kubelet-plugin check --interface dra\"";
    if !is_registered {
        let what =
            format!("the driver {name:?} for claims runs, and the kubelet has not registered it");
        return Check::of(
            &catalog::PLUGIN_NOT_RUNNING,
            what,
            "run \"journalctl -u oci-nvidia-kubelet-plugin\"",
        );
    }
    if let Some(problem) = problem {
        return Check::of(
            &catalog::PLUGIN_DRIVER,
            format!("claims cannot have a device: {problem}"),
            check,
        );
    }
    match unpublished {
        Some(what) => Check::of(&catalog::API_SERVER, what.clone(), check),
        None => serving(&Served::claims(name), offered),
    }
}

/// What serves the kubelet, and with what.
struct Served {
    program: String,
    what: String,
}

impl Served {
    fn claims(driver: &str) -> Self {
        Self {
            program: format!("the driver {driver:?}"),
            what: "claims".to_owned(),
        }
    }
}

/// Checks the health of the devices. The sockets of a plugin that was killed, or that runs in a pod, exist as well: only its answer shows
/// that it works.
fn serving(served: &Served, offered: Option<&Result<Offered, Unanswered>>) -> Check {
    let Served { program, what } = served;
    match offered {
        Some(Ok(offered)) => devices(served, offered),
        Some(Err(Unanswered::NotRunning)) | None => Check::skipped(format!(
            "the kubelet has {what}, and no kubelet plugin answers at its control socket: it was killed, or it runs in a pod, where \
             \"oci-nvidia-kubelet-plugin check\" shows the health of the GPUs"
        )),
        Some(Err(error)) => Check::skipped(format!("{program} serves {what}, and {error}")),
    }
}

fn devices(Served { program, what }: &Served, offered: &Offered) -> Check {
    let all = offered.devices().count();
    let mut gpus: Vec<String> = Vec::new();
    for device in offered.devices() {
        let Some(unhealthy) = &device.unhealthy else {
            continue;
        };
        let gpu = format!("{}: {unhealthy}", device.gpu);
        if !gpus.contains(&gpu) {
            gpus.push(gpu);
        }
    }
    if gpus.is_empty() {
        return Check::ok(format!(
            "{program} serves {what}, and offers {} as healthy",
            count(all, "device")
        ));
    }
    let healthy = offered
        .devices()
        .filter(|device| device.unhealthy.is_none())
        .count();
    Check::of(
        &catalog::PLUGIN_WITHDREW,
        format!(
            "{program} offers {healthy} of {} as healthy: {}",
            count(all, "device"),
            gpus.join(", ")
        ),
        "run \"oci-nvidia-kubelet-plugin check\"; after a repair, \"oci-nvidia-kubelet-plugin clear UUID\" offers a GPU at once",
    )
}
