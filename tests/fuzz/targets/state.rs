//! The container state on stdin.

use oci_nvidia_hook::testing::oci::state::parse;

use super::check_error;

/// Parses the state, and parses it again from the fields that matter.
pub fn run(data: &[u8]) {
    let state = match parse(data) {
        Ok(state) => state,
        Err(error) => return check_error(&error),
    };
    assert!(
        state.pid >= 0 && !state.bundle.as_os_str().is_empty(),
        "{state:?}"
    );
    match state.init() {
        Ok(pid) => assert!(pid > 0, "0 is ourselves"),
        Err(error) => check_error(&error),
    }
    let again =
        serde_json::json!({"id": state.id, "pid": state.pid, "bundle": state.bundle}).to_string();
    assert_eq!(parse(again.as_bytes()).expect("its own fields"), state);
    let with_rest = [data, b"\n{\"id\":"].concat();
    assert_eq!(
        parse(&with_rest).expect("what follows is not looked at"),
        state
    );
}
