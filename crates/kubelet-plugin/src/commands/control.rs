//! The control socket of a running plugin. [`plugin_api::control`] has its messages.

use std::io;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use base::report::Failure;
use findings::catalog;
use plugin_api::control::{self, MAX_LINE, Offered, PATIENCE, Request};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::kubelet::socket;

/// How many clients are served at the same time. A client that sends nothing does not delay the others.
const MAX_CLIENTS: usize = 16;
/// The time before the next attempt if no connection can be accepted.
const PAUSE: Duration = Duration::from_secs(1);

/// A command for the plugin.
#[derive(Debug)]
pub enum ControlCommand {
    /// Forget the errors of the GPU with this UUID, and send whether it had any.
    Clear(String, oneshot::Sender<bool>),
    /// Send the devices and their health.
    Devices(oneshot::Sender<Offered>),
}

/// Accepts commands and passes them on, until the receiver is closed.
///
/// # Errors
/// If the socket cannot be created.
pub async fn serve(dir: &Path, commands: mpsc::Sender<ControlCommand>) -> Result<()> {
    std::fs::create_dir_all(dir).with_context(|| format!("cannot create {dir:?}"))?;
    let (_bound, listener) = socket::bind(&control::socket(dir))?;
    let mut clients = JoinSet::new();
    while !commands.is_closed() {
        let Ok((stream, _)) = listener.accept().await else {
            // Without a free file descriptor, for example. The service must not end because of a command.
            sleep(PAUSE).await;
            continue;
        };
        while clients.try_join_next().is_some() {}
        if clients.len() >= MAX_CLIENTS {
            // One of them ends after a few seconds.
            clients.join_next().await;
        }
        let commands = commands.clone();
        clients.spawn(async move { timeout(PATIENCE, answer(stream, &commands)).await });
    }
    Ok(())
}

async fn answer(stream: UnixStream, commands: &mpsc::Sender<ControlCommand>) -> io::Result<()> {
    let (reader, mut writer) = stream.into_split();
    let mut line = String::new();
    BufReader::new(reader.take(MAX_LINE as u64))
        .read_line(&mut line)
        .await?;
    let reply = match Request::parse(line.trim_end()) {
        Some(Request::Clear(uuid)) => {
            let (done, cleared) = oneshot::channel();
            let command = ControlCommand::Clear(uuid.to_owned(), done);
            commands.send(command).await.ok();
            control::cleared(cleared.await.unwrap_or_default()).to_owned()
        }
        Some(Request::Devices) => {
            let (done, offered) = oneshot::channel();
            commands.send(ControlCommand::Devices(done)).await.ok();
            serde_json::to_string(&offered.await.map_err(io::Error::other)?)?
        }
        None => "unknown command".to_owned(),
    };
    writer.write_all(format!("{reply}\n").as_bytes()).await
}

/// Makes the running plugin forget the errors of a GPU, and returns whether the GPU had any.
///
/// # Errors
/// If no plugin runs, or it does not answer.
pub fn clear(dir: &Path, uuid: &str) -> Result<bool> {
    control::clear(dir, uuid)
        .map_err(|why| anyhow!("{why}"))
        .with_context(|| {
            Failure::new(
                &catalog::SYSTEM,
                format!("cannot clear {uuid:?} in the running plugin"),
                "start the plugin with \"systemctl start oci-nvidia-kubelet-plugin\"; run this command as root",
            )
        })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use base::report::ErrorReport;
    use plugin_api::control::OfferedResource;

    async fn clear_of(dir: &Path, uuid: &str) -> Result<bool> {
        let (dir, uuid) = (dir.to_owned(), uuid.to_owned());
        tokio::task::spawn_blocking(move || clear(&dir, &uuid)).await?
    }

    #[tokio::test]
    async fn one_line_in_each_direction() {
        let dir = tempfile::tempdir().unwrap();
        let (sender, mut commands) = mpsc::channel::<ControlCommand>(1);
        let served = dir.path().to_owned();
        let resource = OfferedResource {
            name: "nvidia.com/gpu".to_owned(),
            ..OfferedResource::default()
        };
        let expected = Offered {
            resources: vec![resource.clone()],
            ..Offered::default()
        };
        let server = tokio::spawn(async move { serve(&served, sender).await });
        tokio::spawn(async move {
            while let Some(command) = commands.recv().await {
                match command {
                    ControlCommand::Clear(uuid, done) => done.send(uuid == "GPU-0").unwrap(),
                    ControlCommand::Devices(done) => {
                        done.send(Offered {
                            resources: vec![resource.clone()],
                            ..Offered::default()
                        })
                        .unwrap();
                    }
                }
            }
        });
        while std::fs::symlink_metadata(control::socket(dir.path())).is_err() {
            tokio::task::yield_now().await;
        }
        assert!(clear_of(dir.path(), "GPU-0").await.unwrap());
        assert!(!clear_of(dir.path(), "GPU-1").await.unwrap());
        let asked = dir.path().to_owned();
        let offered = tokio::task::spawn_blocking(move || control::devices(&asked))
            .await
            .unwrap();
        assert_eq!(offered.unwrap(), expected);
        let mut strange = UnixStream::connect(control::socket(dir.path()))
            .await
            .unwrap();
        strange.write_all(&[0xff; 600]).await.ok();
        drop(strange);
        assert!(
            !clear_of(dir.path(), "GPU-1").await.unwrap(),
            "still serves"
        );
        // Peers that send nothing do not delay the next command. A line that is too long is not a command.
        let mut silent = Vec::new();
        for _ in 1..MAX_CLIENTS {
            silent.push(
                UnixStream::connect(control::socket(dir.path()))
                    .await
                    .unwrap(),
            );
        }
        let begun = std::time::Instant::now();
        assert!(
            !clear_of(dir.path(), &"G".repeat(100_000))
                .await
                .unwrap_or_default()
        );
        assert!(clear_of(dir.path(), "GPU-0").await.unwrap(), "still serves");
        assert!(begun.elapsed() < PATIENCE);
        drop(silent);
        let mode = std::fs::metadata(control::socket(dir.path()))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o600);
        server.abort();
        assert!(server.await.unwrap_err().is_cancelled());
        assert!(std::fs::symlink_metadata(control::socket(dir.path())).is_err());
        let error = ErrorReport::new(&clear_of(dir.path(), "GPU-0").await.unwrap_err());
        assert!(
            error
                .line
                .starts_with("cannot clear \"GPU-0\" in the running plugin: "),
            "{error:?}"
        );
        assert!(
            error.hint.starts_with("start the plugin with "),
            "{error:?}"
        );
    }
}
