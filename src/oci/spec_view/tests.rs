use super::*;
use crate::plan::request;

fn view(text: &str) -> Result<SpecView> {
    parse(text.as_bytes(), Path::new("/bundle"))
}

#[test]
fn reads_a_captured_spec_of_a_kubelet_pod() {
    let spec = include_bytes!("../../../tests/fixtures/captures/kubelet-prestart/config.json");
    let spec = parse(spec, Path::new("/bundle")).unwrap();
    assert!(spec.rootfs.ends_with("merged"));
    assert_eq!(
        spec.env["NVIDIA_VISIBLE_DEVICES"],
        "GPU-00000000-1111-2222-3333-444444444444"
    );
    assert!(!spec.privileged);
    assert_eq!(spec.device_rules.len(), 2);
}

#[test]
fn a_relative_rootfs_is_below_the_bundle() {
    let spec = view(r#"{"root":{"path":"rootfs"},"process":{}}"#).unwrap();
    assert_eq!(spec.rootfs, Path::new("/bundle/rootfs"));
}

#[test]
fn unknown_values_are_ignored() {
    let spec = view(
        r#"{"ociVersion":"9","process":{"env":["A=1","A=2=3"],"new":1,"capabilities":{"bounding":["CAP_NEW"]}},
           "root":{"path":"/r"},"linux":{"resources":{"devices":[{"allow":true,"type":"z"},{"allow":true,"type":"c","major":195,"access":"rwm"}]}}}"#,
    )
    .unwrap();
    assert_eq!(spec.env["A"], "2=3");
    assert_eq!(spec.device_rules.len(), 1);
}

/// The rest is skipped only if it cannot contain a request.
#[test]
fn a_possible_request_is_parsed_completely() {
    let mount = |path: &str| format!(r#"{{"source":"/dev/null","destination":"{path}"}}"#);
    for (env, mounts, whole) in [
        ("A=1", mount("/var/run/x"), false),
        ("NVIDIA_VISIBLE_DEVICES=void", mount("/x"), false),
        ("NVIDIA_VISIBLE_DEVICES=0", mount("/x"), true),
        ("CUDA_VERSION=9.0", mount("/x"), true),
        ("DOCKER_RESOURCE_X=0", mount("/x"), true),
        ("A=1", mount("/var/run/nvidia-container-devices/0"), true),
        (
            "A=1",
            mount("\\/var\\/run\\/nvidia-container-devices\\/0"),
            true,
        ),
        (
            "A=1",
            mount("/var/run/\\u006evidia-container-devices/0"),
            true,
        ),
    ] {
        let text = format!(
            r#"{{"root":{{"path":"/r"}},"process":{{"env":["{env}"]}},"mounts":[{mounts}]}}"#
        );
        let spec = parse_if(text.as_bytes(), Path::new("/bundle"), request::may_ask).unwrap();
        assert_eq!(spec.mounts.len(), usize::from(whole), "{env} {mounts}");
        assert!(
            whole || request::hint(&view(&text).unwrap()) == request::Hint::No,
            "{env} {mounts}"
        );
    }
    let gpu = r#"{"path":"/dev/nvidia0","type":"c","major": 195,"minor":0}"#;
    let fuse = r#"{"path":"/dev/fuse","type":"c","major":10,"minor":229}"#;
    for (process, device, whole) in [
        ("", gpu, true),
        ("", fuse, false),
        (r#""env":["NVIDIA_VISIBLE_DEVICES=void"]"#, gpu, false),
        (
            r#""capabilities":{"bounding":["CAP_SYS_ADMIN"]}"#,
            gpu,
            false,
        ),
    ] {
        let text = format!(
            r#"{{"root":{{"path":"/r"}},"process":{{{process}}},"linux":{{"devices":[{device}]}}}}"#
        );
        let spec = parse_if(text.as_bytes(), Path::new("/bundle"), request::may_ask).unwrap();
        assert_eq!(spec.devices.len(), usize::from(whole), "{process} {device}");
        assert_eq!(
            request::hint(&view(&text).unwrap()) == request::Hint::Perhaps,
            whole,
            "{process} {device}"
        );
    }
}

#[test]
fn the_mount_label_is_text_or_none() {
    for (linux, label) in [
        (
            r#"{"mountLabel":"system_u:object_r:container_file_t:s0:c1,c2"}"#,
            "system_u:object_r:container_file_t:s0:c1,c2",
        ),
        (r#"{"mountLabel":""}"#, ""),
        (r#"{"mountLabel":null}"#, ""),
        (r#"{"mountLabel":3}"#, ""),
        ("{}", ""),
        ("null", ""),
    ] {
        let spec = view(&format!(
            r#"{{"root":{{"path":"/r"}},"process":{{}},"linux":{linux}}}"#
        ))
        .unwrap();
        assert_eq!(spec.mount_label, label, "{linux}");
    }
}

#[test]
fn privilege_is_judged_by_the_bounding_set() {
    for (capabilities, privileged) in [
        (r#"{"bounding":["CAP_SYS_ADMIN"]}"#, true),
        (
            r#"{"bounding":["CAP_CHOWN"],"effective":["CAP_SYS_ADMIN"]}"#,
            false,
        ),
        (r#"["CAP_SYS_ADMIN"]"#, true),
        ("null", false),
        ("3", false),
    ] {
        let spec = view(&format!(
            r#"{{"root":{{"path":"/r"}},"process":{{"capabilities":{capabilities}}}}}"#
        ))
        .unwrap();
        assert_eq!(
            (spec.privileged, spec.has_all_nodes),
            (privileged, privileged),
            "{capabilities}"
        );
    }
}

/// CAP_SYS_ADMIN of another user namespace gives no access to the host's devices.
#[test]
fn a_user_namespace_has_no_privilege() {
    let own = r#""namespaces":[{"type":"mount"},{"type":"user"}]"#;
    let joined = r#""namespaces":[{"type":"user","path":"/proc/1/ns/user"}]"#;
    let of_privileged =
        r#""resources":{"devices":[{"allow":false,"access":"rwm"},{"allow":true,"access":"rwm"}]}"#;
    let of_others = r#""resources":{"devices":[{"allow":false,"access":"rwm"},{"allow":true,"type":"c","access":"m"}]}"#;
    for (linux, privileged, has_all_nodes) in [
        (r#""namespaces":[{"type":"mount"}]"#.to_owned(), true, true),
        (
            r#""namespaces":[{"type":"mount"},3,null]"#.to_owned(),
            true,
            true,
        ),
        (own.to_owned(), false, false),
        (joined.to_owned(), false, false),
        (
            r#""namespaces":[{"\u0074ype":"us\u0065r"}]"#.to_owned(),
            false,
            false,
        ),
        (format!("{own},{of_privileged}"), false, true),
        (format!("{own},{of_others}"), false, false),
    ] {
        let text = format!(
            r#"{{"root":{{"path":"/r"}},"process":{{"capabilities":{{"bounding":["CAP_SYS_ADMIN"]}}}},"linux":{{{linux}}}}}"#
        );
        let partial = parse_if(text.as_bytes(), Path::new("/bundle"), |_, _, _| false).unwrap();
        for spec in [view(&text).unwrap(), partial] {
            assert_eq!(
                (spec.privileged, spec.has_all_nodes),
                (privileged, has_all_nodes),
                "{linux}"
            );
        }
    }
}

#[test]
fn bad_specs_are_named() {
    for (text, says) in [
        ("", "empty"),
        ("{", "EOF"),
        (r#"{"process":{}}"#, "no \"root.path\""),
        (r#"{"root":{"path":"/r"}}"#, "no \"process\""),
        (
            r#"{"root":{"path":"/r"},"process":{"env":["FOO"]}}"#,
            "\"FOO\", which is not NAME=VALUE",
        ),
    ] {
        let text = base::report::render(&view(text).unwrap_err());
        assert!(text.contains(says), "{text}");
    }
}
