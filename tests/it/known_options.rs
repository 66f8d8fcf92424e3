//! Compares a command line with the options of NVIDIA's programs: for the unit tests of the programs that have their names.

/// Checks that a program knows each option of NVIDIA's program `name`, so that it is carried out, or refused with a reason. Returns how
/// many options were compared.
pub(super) fn check(cli: &clap::Command, refused: &[&str], name: &str) -> usize {
    let parts = include_str!("../fixtures/conformance/parts.json");
    let parts: serde_json::Value = serde_json::from_str(parts).unwrap();
    let mut count = 0;
    for (line, options) in parts["commands"].as_object().unwrap() {
        let Some(verbs) = line.strip_prefix(name) else {
            continue;
        };
        let mut command = cli;
        for verb in verbs.split_whitespace() {
            command = command
                .find_subcommand(verb)
                .unwrap_or_else(|| panic!("{line}: {verb} is unknown"));
        }
        let mut known = Vec::new();
        for arg in command.get_arguments() {
            known.extend(arg.get_long());
            known.extend(arg.get_all_aliases().unwrap_or_default());
        }
        for option in options.as_array().unwrap() {
            let option = option.as_str().unwrap();
            let is_known = known.contains(&option.trim_start_matches('-'));
            assert!(is_known || refused.contains(&option), "{line}: {option}");
            count += 1;
        }
    }
    count
}
