//! Checks the devices next to the GPUs: GPUDirect Storage, GPUDirect RDMA, GDRCopy and NVSwitches.

use findings::catalog;
use nvidia_host::feature::{ENABLED, Feature, FeatureRow};

use super::check::{Check, count};
use super::driver::no_module;
use super::facts::Facts;

pub(super) fn check(facts: &Facts) -> Vec<Check> {
    if facts.driver.module.is_none() {
        return vec![no_module(facts)];
    }
    let (mut checks, mut absent) = (Vec::new(), Vec::new());
    for feature in Feature::ALL {
        let nodes = facts
            .driver
            .features
            .iter()
            .find(|(known, _)| *known == feature)
            .map_or(0, |(_, nodes)| nodes.len());
        match (nodes, reason_for_nodes(facts, feature)) {
            (0, None) => absent.push(absent_in_words(feature)),
            (0, Some(reason)) => checks.push(without_nodes(feature, &reason)),
            (nodes, _) => checks.push(Check::ok(available(facts, feature, nodes))),
        }
    }
    if !absent.is_empty() {
        checks.push(Check::skipped(format!(
            "this host does not have {}",
            absent.join(", ")
        )));
    }
    checks
}

/// Returns why the nodes of a feature should exist. Many hosts without an RDMA device load its module.
fn reason_for_nodes(facts: &Facts, feature: Feature) -> Option<String> {
    let module = feature.row().module;
    match feature {
        Feature::Mofed => None,
        Feature::Gds | Feature::Gdrcopy => facts
            .driver
            .modules
            .contains(module)
            .then(|| format!("the kernel module {module} is loaded")),
        Feature::Nvswitch => {
            let switches = facts.driver.switches();
            (switches > 0).then(|| format!("this host has {}", count(switches, "NVSwitch device")))
        }
    }
}

fn without_nodes(feature: Feature, reason: &str) -> Check {
    let first = feature.row().nodes.first().copied().unwrap_or_default();
    let fix = match feature {
        Feature::Nvswitch => feature.how_to_get_nodes(),
        _ => "restart the service of its package, which loads the module and creates the nodes"
            .to_owned(),
    };
    Check::of(
        &catalog::NO_FEATURE,
        format!("{reason}, but \"/dev/{first}\" is missing"),
        fix,
    )
}

fn absent_in_words(feature: Feature) -> String {
    let FeatureRow { title, module, .. } = feature.row();
    match feature {
        // It is the module of the GPUs.
        Feature::Nvswitch => (*title).to_owned(),
        _ => format!("{title} (kernel module {module})"),
    }
}

/// Returns how containers get a feature of this host.
fn available(facts: &Facts, feature: Feature, nodes: usize) -> String {
    let FeatureRow {
        name,
        title,
        variable,
        ..
    } = feature.row();
    if facts.settings().devices.denied_features.has(feature) {
        return format!("[devices] in config.toml denies {title} to containers");
    }
    let device = format!("nvidia.com/{name}=all");
    let mut verdicts = facts.cdi.iter().flat_map(|view| &view.verdicts);
    let by_name = match verdicts.any(|verdict| verdict.ok && verdict.subject == device) {
        true => format!(" or the CDI device {device}"),
        false => format!("; no usable CDI spec contains {device}"),
    };
    format!(
        "containers get {title} ({}) with {variable}={ENABLED}{by_name}",
        count(nodes, "device node")
    )
}
