//! One hook file.

use serde_json::Value;

use base::report::one_line;
use engines::hook_file::{Applies, PRECREATE, parse};

use super::check_line;

/// Parses the file, and parses it again with changes that have no effect or one effect.
pub fn run(data: &[u8]) {
    let hook = match parse(data) {
        Ok(hook) => hook,
        Err(why) => {
            assert!(!why.is_empty());
            return check_line(&one_line(&why));
        }
    };
    assert!(!hook.path.as_os_str().is_empty());
    let refused = hook.check(false).err();
    refused
        .iter()
        .for_each(|why| check_line(&one_line(&why.to_string())));
    let knows_one_more = hook.check(true);
    assert!(refused.is_some() || knows_one_more.is_ok(), "{hook:?}");
    if refused.is_some() && knows_one_more.is_ok() {
        assert!(
            hook.stages.iter().any(|stage| stage == PRECREATE),
            "{hook:?}"
        );
    }
    let mut file: Value = serde_json::from_slice(data).expect("it was parsed");
    let with = |file: &Value| parse(file.to_string().as_bytes());
    file["of nobody"] = true.into();
    assert_eq!(with(&file).expect("an unknown field is passed over"), hook);
    if file["version"] == "1.0.0" {
        file["when"]["always"] = false.into();
        assert_eq!(
            with(&file).expect("a condition more").applies,
            Applies::Never,
            "{hook:?}"
        );
        file["when"] = serde_json::json!({"always": true});
        assert_eq!(
            with(&file).expect("no other condition").applies,
            Applies::Always,
            "{hook:?}"
        );
    }
    file["stages"] = Value::Null;
    file["stage"] = Value::Null;
    with(&file).expect_err("a hook needs stages");
}
