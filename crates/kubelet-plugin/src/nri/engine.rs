//! Connects to the socket of an engine, and connects again when the engine restarts or its socket appears later.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::session::{Identity, Plugin, Session};

/// The socket of containerd and CRI-O.
pub const SOCKET: &str = "/var/run/nri/nri.sock";
/// The wait before the first new try. An engine that restarts creates containers as soon as it runs.
const FIRST_WAIT: Duration = Duration::from_millis(50);
/// The longest wait between two tries.
const LONGEST_WAIT: Duration = Duration::from_secs(1);
/// How long an engine may take to configure us. It allows 5 s for our registration.
const CONFIGURE_TIME: Duration = Duration::from_secs(10);
/// How long an engine may take to read an answer: it waits 2 s for it.
const WRITE_TIME: Duration = Duration::from_secs(2);

/// How engines are served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NriOptions {
    /// The socket of the engine
    pub socket: PathBuf,
    /// Our name and place
    pub identity: Identity,
}

/// Describes an engine that has configured us.
fn configured(engine: &str) -> String {
    if ignores_cdi(engine) {
        return format!(
            "{engine} ignores CDI devices from NRI plugins, so containers get no GPUs; use containerd 2.1 or newer"
        );
    }
    format!("{engine} asks about its containers with NRI")
}

/// Reports whether the engine is containerd 1, which accepts adjustments with CDI devices and does not apply them.
fn ignores_cdi(engine: &str) -> bool {
    engine
        .strip_prefix("containerd ")
        .is_some_and(|version| version.trim_start_matches('v').starts_with("1."))
}

/// Serves the engine until the future is dropped. `log` writes a line. Reports a failure only if it differs from the last one.
pub async fn serve(options: &NriOptions, plugin: &impl Plugin, log: impl Fn(&str)) -> Infallible {
    let mut wait = FIRST_WAIT;
    let mut reported = None;
    loop {
        let mut was_configured = false;
        let ended = converse(options, plugin, |engine| {
            was_configured = true;
            log(&configured(engine));
        });
        let why = ended.await.map_or_else(
            |error| format!("{error:#}"),
            |()| "the engine closed the connection".to_owned(),
        );
        if was_configured {
            wait = FIRST_WAIT;
            reported = None;
        }
        let line = format!(
            "cannot serve NRI on {:?}: {why}; trying again",
            options.socket
        );
        if reported.as_ref() != Some(&line) {
            log(&line);
            reported = Some(line);
        }
        sleep(wait).await;
        wait = (wait * 2).min(LONGEST_WAIT);
    }
}

/// Converses until the engine closes the connection.
async fn converse(
    options: &NriOptions,
    plugin: &impl Plugin,
    mut note_engine: impl FnMut(&str),
) -> Result<()> {
    let mut stream = connect(&options.socket).await?;
    let deadline = Instant::now() + CONFIGURE_TIME;
    let (mut session, first) = Session::start(&options.identity);
    write(&mut stream, &first).await?;
    let mut buffer = vec![0; 1 << 14];
    let mut is_configured = false;
    loop {
        let read = stream.read(&mut buffer);
        let length = match is_configured {
            true => read.await,
            false => timeout_at(deadline, read)
                .await
                .context("the engine does not configure the plugin")?,
        };
        let length = length.context("cannot read")?;
        if length == 0 {
            return Ok(());
        }
        let mut answer = Vec::new();
        session.receive(
            buffer.get(..length).unwrap_or_default(),
            plugin,
            &mut answer,
        )?;
        write(&mut stream, &answer).await?;
        if let Some(engine) = session.engine().filter(|_| !is_configured) {
            is_configured = true;
            note_engine(engine);
        }
    }
}

async fn connect(socket: &Path) -> Result<UnixStream> {
    UnixStream::connect(socket).await.context("cannot connect")
}

async fn write(stream: &mut UnixStream, bytes: &[u8]) -> Result<()> {
    timeout(WRITE_TIME, stream.write_all(bytes))
        .await
        .context("the engine does not read")?
        .context("cannot write")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_that_ignore_cdi_devices() {
        for (engine, ignores) in [
            ("containerd 1.7.24~ds1", true),
            ("containerd v1.7.27", true),
            ("containerd v2.1.4", false),
            ("cri-o 1.37.0", false),
        ] {
            let line = configured(engine);
            assert_eq!(line.contains("ignores CDI devices"), ignores, "{line}");
        }
    }
}
