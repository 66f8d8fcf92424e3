//! Compares the output of `nvidia-smi`.

/// Returns the table without the line with the time and without the processes, which differ in a container.
fn static_part(table: &str) -> Vec<&str> {
    let lines: Vec<_> = table.lines().skip(1).collect();
    let end = lines
        .iter()
        .position(|line| line.contains("Processes:"))
        .unwrap_or(lines.len());
    lines.get(..end).unwrap_or_default().to_vec()
}

/// Replaces values that change from moment to moment: temperature, power, fan, clocks, use of memory and GPU.
fn without_values(line: &str) -> String {
    let is_value = |word: &str| {
        let digits = word
            .trim_end_matches(['C', 'W', '%'])
            .trim_end_matches("MiB");
        let is_number =
            digits != word && !digits.is_empty() && digits.chars().all(|c| c.is_ascii_digit());
        let is_state = word
            .strip_prefix('P')
            .is_some_and(|rest| !rest.is_empty() && rest.chars().all(|c| c.is_ascii_digit()));
        is_number || is_state
    };
    line.split_whitespace()
        .map(|word| if is_value(word) { "#" } else { word })
        .collect::<Vec<_>>()
        .join(" ")
}

/// Compares two tables, and returns how far they agree.
///
/// # Errors
/// The first line that differs.
pub fn same_table(host: &str, container: &str) -> Result<&'static str, String> {
    let (host, container) = (static_part(host), static_part(container));
    if host.len() < 5 {
        return Err(format!(
            "the host's nvidia-smi prints no table: {}",
            host.join("; ")
        ));
    }
    if host == container {
        return Ok("byte-equal except for time and processes");
    }
    let (mut ours, mut theirs) = (container.iter(), host.iter());
    loop {
        match (ours.next(), theirs.next()) {
            (None, None) => {
                return Ok(
                    "equal except for time, processes, and values such as temperature and power",
                );
            }
            (Some(ours), Some(theirs)) if without_values(ours) == without_values(theirs) => {}
            (ours, theirs) => {
                let show = |line: Option<&&str>| {
                    line.map_or_else(|| "the end".to_owned(), |line| format!("\"{line}\""))
                };
                return Err(format!(
                    "nvidia-smi prints {} instead of {}",
                    show(ours),
                    show(theirs)
                ));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(time: &str, temperature: &str, driver: &str) -> String {
        format!(
            "{time}\n+---+\n| NVIDIA-SMI {driver}     Driver Version: {driver} |\n|---|\n| GPU  Name |\n| Fan  Temp |\n|===|\n\
             |   0  NVIDIA H100 80GB HBM3  Off | 00000000:01:00.0 Off |  0 |\n\
             | N/A   {temperature}    P0   70W / 700W |   4MiB / 81559MiB |   0%   Default |\n+---+\n\n+---+\n| Processes: |\n| {time} |\n"
        )
    }

    #[test]
    fn tables_are_compared() {
        let host = table("Mon", "30C", "535.1");
        assert_eq!(
            same_table(&host, &table("Tue", "30C", "535.1")),
            Ok("byte-equal except for time and processes")
        );
        assert!(
            same_table(&host, &table("Tue", "31C", "535.1"))
                .unwrap()
                .contains("temperature")
        );
        assert!(
            same_table(&host, &table("Mon", "30C", "550.1"))
                .unwrap_err()
                .contains("550.1")
        );
        assert!(same_table(&host, "No devices were found\n").is_err());
        assert!(same_table("NVIDIA-SMI has failed\n", "NVIDIA-SMI has failed\n").is_err());
    }
}
