//! `NVIDIA_REQUIRE_*`: the rules of logic hold for well-formed requirements.

use std::cmp::Ordering;

use nvidia_host::require::{
    Properties, Requirement, check, compare_versions, evaluate, parse_cuda_version,
};

use super::{check_error, text};

/// Evaluates the requirement as a whole and in parts.
pub fn run(data: &[u8]) {
    let text = text(data);
    let known = Properties {
        cuda: Some("12.2".to_owned()),
        driver: Some("535.183.01".to_owned()),
        arch: Some("9.0".to_owned()),
        brand: Some("Tesla".to_owned()),
    };
    for properties in [&known, &Properties::default()] {
        check_logic(&text, properties);
    }
    assert_ne!(
        evaluate(&text, &Properties::default()),
        Ok(false),
        "nothing is known that could be against it"
    );
    let requirement = Requirement {
        variable: "NVIDIA_REQUIRE_CUDA".to_owned(),
        text: text.to_string(),
    };
    let gpus = [
        ("GPU 0".to_owned(), known),
        ("GPU 1".to_owned(), Properties::default()),
    ];
    if let Err(error) = check(&requirement, &gpus) {
        check_error(&error);
    }
    if let Some((major, minor)) = parse_cuda_version(&text) {
        assert_eq!(
            parse_cuda_version(&format!("{major}.{minor}")),
            Some((major, minor))
        );
    }
    let versions: Vec<_> = text.split([' ', ',']).take(8).collect();
    for (a, b) in versions.iter().zip(versions.iter().skip(1)) {
        check_order(a, b);
    }
}

/// A space means or, a comma means and.
fn check_logic(text: &str, properties: &Properties) {
    let terms = || {
        text.split(' ')
            .filter(|term| term.split(',').any(|factor| !factor.is_empty()))
    };
    if let Some(results) = each(terms(), properties) {
        let any = results.is_empty() || results.contains(&true);
        assert_eq!(evaluate(text, properties), Ok(any), "{text:?}");
    }
    for term in terms() {
        if let Some(results) = each(
            term.split(',').filter(|factor| !factor.is_empty()),
            properties,
        ) {
            assert_eq!(
                evaluate(term, properties),
                Ok(!results.contains(&false)),
                "{term:?}"
            );
        }
    }
}

/// Returns the value of each part; `None` if one is malformed.
fn each<'a>(parts: impl Iterator<Item = &'a str>, properties: &Properties) -> Option<Vec<bool>> {
    parts.map(|part| evaluate(part, properties).ok()).collect()
}

fn check_order(a: &str, b: &str) {
    assert_eq!(
        compare_versions(a, b),
        compare_versions(b, a).map(Ordering::reverse),
        "{a:?} {b:?}"
    );
    if let Some(order) = compare_versions(a, b) {
        assert_eq!(compare_versions(a, a), Some(Ordering::Equal));
        assert_eq!(
            compare_versions(&format!("{a}.0"), &format!("0{b}")),
            Some(order),
            "what is missing is zero"
        );
    }
}
