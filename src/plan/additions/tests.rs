use proptest::prelude::*;

use cdi_spec::spec::ContainerEdits;

use super::*;
use crate::oci::spec_view::parse;

const HOST: OciFacts = OciFacts {
    in_user_namespace: false,
};
const ROOTLESS: OciFacts = OciFacts {
    in_user_namespace: true,
};

fn node(minor: i64) -> DeviceNode {
    DeviceNode {
        path: format!("/dev/nvidia{minor}"),
        host_path: Some(format!("/driver/dev/nvidia{minor}")),
        major: Some(195),
        minor: Some(minor),
        file_mode: Some(0o660),
        permissions: Some("rw".to_owned()),
        gid: Some(44),
        ..DeviceNode::default()
    }
}

fn edits() -> ContainerEdits {
    let hook = RootfsEdits {
        egl_devices: 1,
        ..RootfsEdits::default()
    };
    ContainerEdits {
        device_nodes: vec![node(0)],
        mounts: vec![Mount {
            host_path: "/usr/lib64/libcuda.so.535".into(),
            container_path: "/usr/lib/x86_64-linux-gnu/libcuda.so.535".into(),
            options: vec!["ro".into(), "rbind".into()],
            kind: None,
        }],
        hooks: vec![Hook {
            path: "/usr/bin/oci-nvidia-hook".into(),
            args: hook.to_args().unwrap(),
            env: vec!["PATH=/bin".into()],
            ..Hook::default()
        }],
        additional_gids: vec![44, 44],
        ..ContainerEdits::default()
    }
}

fn with(more: &str) -> String {
    format!(r#"{{"root":{{"path":"/r"}},"process":{{"cwd":"/"}},"x":1e400{more}}}"#)
}

fn patched(config: &str, edits: &ContainerEdits, facts: OciFacts) -> Result<String> {
    Additions::new(edits, &parse(config.as_bytes(), Path::new("/"))?, facts)
        .apply(config.to_owned())
}

/// `Value` cannot hold every number of a config.json.
fn value(text: &str) -> Value {
    serde_json::from_str(&text.replace("1e400", "0")).unwrap()
}

#[test]
fn all_that_an_engine_would_add() {
    let text = patched(&with(""), &edits(), HOST).unwrap();
    assert!(
        text.starts_with(r#"{"root":{"path":"/r"},"process":{"cwd":"/","#)
            && text.contains("\"x\":1e400"),
        "{text}"
    );
    let found = value(&text);
    let device = json!({"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0, "fileMode": 0o660, "uid": 0, "gid": 44});
    assert_eq!(found["linux"]["devices"], json!([device]));
    let rule = json!({"allow": true, "type": "c", "major": 195, "minor": 0, "access": "rw"});
    assert_eq!(found["linux"]["resources"]["devices"], json!([rule]));
    assert_eq!(found["process"]["user"]["additionalGids"], json!([44]));
    assert_eq!(found["mounts"][0]["source"], "/usr/lib64/libcuda.so.535");
    assert_eq!(found["mounts"][0]["options"], json!(["ro", "rbind"]));
    let hook = &found["hooks"]["createRuntime"][0];
    assert_eq!(
        (&hook["args"][1], &hook["env"][0]),
        (&json!("rootfs"), &json!("PATH=/bin"))
    );
    assert_eq!(
        patched(&text, &edits(), HOST).unwrap(),
        text,
        "twice is once"
    );
}

/// Items that config.json contains already are not added again.
#[test]
fn nothing_twice() {
    for (more, left_out) in [
        (
            r#","linux":{"devices":[{"path":"/dev/nvidia0","type":"c","major":195,"minor":0}]}"#,
            "devices",
        ),
        (
            r#","mounts":[{"destination":"/dev/nvidia0/","type":"bind"}]"#,
            "devices",
        ),
        (
            r#","linux":{"resources":{"devices":[{"allow":true,"access":"rwm"}]}}"#,
            "rules",
        ),
        (
            r#","mounts":[{"destination":"/usr/lib/x86_64-linux-gnu/libcuda.so.535"}]"#,
            "mounts",
        ),
    ] {
        let config = with(more);
        let spec = parse(config.as_bytes(), Path::new("/")).unwrap();
        let found = Additions::new(&edits(), &spec, HOST);
        let counts = [
            ("devices", &found.devices),
            ("rules", &found.device_rules),
            ("mounts", &found.mounts),
        ];
        for (name, items) in counts {
            assert_eq!(items.len(), usize::from(name != left_out), "{more}: {name}");
        }
    }
}

/// The host's node is mounted if the runtime cannot create one, or would create it in a directory of the host.
#[test]
fn nodes_that_are_mounted() {
    let in_user_namespace = r#","linux":{"namespaces":[{"type":"mount"},{"type":"user"}]}"#;
    let dev_of_host = r#","mounts":[{"destination":"/dev","options":["rbind"]}]"#;
    let tmpfs_in_bind =
        r#","mounts":[{"destination":"/","type":"bind"},{"destination":"/dev","type":"tmpfs"}]"#;
    for (more, facts, mounted, rules) in [
        ("", ROOTLESS, true, 0),
        (in_user_namespace, HOST, true, 1),
        (dev_of_host, HOST, true, 1),
        (tmpfs_in_bind, HOST, false, 1),
        ("", HOST, false, 1),
    ] {
        let config = with(more);
        let spec = parse(config.as_bytes(), Path::new("/")).unwrap();
        let found = Additions::new(&edits(), &spec, facts);
        assert_eq!(
            (found.devices.is_empty(), found.device_rules.len()),
            (mounted, rules),
            "{more}"
        );
        let is_node = |mount: &&Value| mount["destination"] == "/dev/nvidia0";
        let mount = found.mounts.iter().find(is_node);
        assert_eq!(mount.is_some(), mounted, "{more}");
        if let Some(mount) = mount {
            assert_eq!(mount["source"], "/driver/dev/nvidia0");
            assert!(!mount["options"].to_string().contains("nodev"));
        }
    }
}

#[test]
fn groups_by_their_numbers_in_the_container() {
    let gids = |more: &str, gid: u32, facts| {
        let edits = ContainerEdits {
            additional_gids: vec![gid],
            ..ContainerEdits::default()
        };
        let config = with(more);
        Additions::new(
            &edits,
            &parse(config.as_bytes(), Path::new("/")).unwrap(),
            facts,
        )
        .additional_gids
    };
    let mapped = r#","linux":{"namespaces":[{"type":"user"}],"gidMappings":[{"containerID":5,"hostID":40,"size":5}]}"#;
    assert_eq!(gids(mapped, 44, HOST), [json!(9)]);
    assert!(gids(mapped, 45, HOST).is_empty() && gids(mapped, 39, HOST).is_empty());
    assert_eq!(gids("", 44, HOST), [json!(44)]);
    assert!(
        gids("", OVERFLOW_ID, ROOTLESS).is_empty(),
        "whatever is not mapped looks like this one"
    );
    assert_eq!(gids("", OVERFLOW_ID, HOST), [json!(OVERFLOW_ID)]);
}

fn any_config() -> impl Strategy<Value = String> {
    let minors = || prop::collection::btree_set(0..4_i64, 0..3);
    let rules = prop_oneof![
        Just(String::new()),
        Just(r#"{"allow":false,"access":"rwm"},"#.to_owned()),
        Just(
            r#"{"allow":true,"access":"rwm"},{"allow":false,"type":"c","major":195,"minor":1,"access":"w"},"#
                .to_owned()
        ),
    ];
    (minors(), minors(), rules, any::<bool>()).prop_map(|(devices, allowed, rules, user)| {
        let devices: Vec<_> = devices
            .iter()
            .map(|minor| format!(r#"{{"path":"/dev/nvidia{minor}","type":"c","major":195,"minor":{minor}}}"#))
            .collect();
        let allowed: Vec<_> = allowed
            .iter()
            .map(|minor| format!(r#"{{"allow":true,"type":"c","major":195,"minor":{minor},"access":"rwm"}}"#))
            .collect();
        let rules = format!("{rules}{}", allowed.join(","));
        let namespace = if user { r#"{"type":"user"}"# } else { "" };
        with(&format!(
            r#","linux":{{"new":18446744073709551616,"devices":[{}],"namespaces":[{namespace}],"resources":{{"devices":[{}]}}}}"#,
            devices.join(","),
            rules.trim_end_matches(',')
        ))
    })
}

/// Whether config.json allows the container to use the device with this minor number.
fn allows(config: &str, minor: u32) -> bool {
    let spec = parse(config.as_bytes(), Path::new("/")).unwrap();
    already_allowed(&spec.device_rules, DeviceRule { major: 195, minor })
}

proptest! {
    /// Exactly the nodes of the edits become usable.
    #[test]
    fn exactly_its_nodes_are_allowed(config in any_config(), nodes in prop::collection::btree_set(0..4_i64, 0..4)) {
        let edits = ContainerEdits { device_nodes: nodes.iter().map(|minor| node(*minor)).collect(), ..edits() };
        let text = patched(&config, &edits, HOST).unwrap();
        for minor in 0..6 {
            let ours = nodes.contains(&i64::from(minor));
            prop_assert_eq!(allows(&text, minor), ours || allows(&config, minor), "{} in {}", minor, text);
            let there = value(&text).to_string().matches(&format!("\"/dev/nvidia{minor}\"")).count();
            let before = value(&config).to_string().matches(&format!("\"/dev/nvidia{minor}\"")).count();
            prop_assert_eq!(there, before.max(usize::from(ours)), "each once");
        }
        prop_assert_eq!(&patched(&text, &edits, HOST).unwrap(), &text, "twice is once");
        prop_assert!(text.contains("18446744073709551616") && text.contains("1e400"));
    }
}
