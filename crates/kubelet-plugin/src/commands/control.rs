//! The socket on which a running plugin takes commands. `clear UUID` is the only one: it forgets the errors of a GPU.
//!
//! Only root can connect. A connection carries one line in each direction.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use base::report::failure;
use findings::catalog;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use crate::kubelet::socket;

/// The runtime directory of the unit.
pub const RUN_DIR: &str = "/run/oci-nvidia-kubelet-plugin";
/// The longest line in bytes.
const MAX_LINE: u64 = 256;
/// How long a peer may take for its line.
const PATIENCE: Duration = Duration::from_secs(5);

/// A command for the plugin.
#[derive(Debug)]
pub struct Clear {
    /// The UUID of the GPU
    pub uuid: String,
    /// Receives whether the GPU had errors
    pub done: oneshot::Sender<bool>,
}

fn path(dir: &Path) -> PathBuf {
    dir.join("control.sock")
}

/// Accepts commands and passes them on, until the receiver is closed.
///
/// # Errors
/// If the socket cannot be created.
pub async fn serve(dir: &Path, commands: mpsc::Sender<Clear>) -> Result<()> {
    std::fs::create_dir_all(dir).with_context(|| format!("cannot create {dir:?}"))?;
    let (_bound, listener) = socket::bind(&path(dir))?;
    while !commands.is_closed() {
        let (stream, _) = listener.accept().await.context("cannot accept a connection")?;
        // The next peer waits for at most a few seconds.
        timeout(PATIENCE, answer(stream, &commands)).await.ok();
    }
    Ok(())
}

async fn answer(stream: UnixStream, commands: &mpsc::Sender<Clear>) -> io::Result<()> {
    let (reader, mut writer) = stream.into_split();
    let mut line = String::new();
    BufReader::new(reader.take(MAX_LINE)).read_line(&mut line).await?;
    let reply = match line.trim_end().strip_prefix("clear ") {
        Some(uuid) => {
            let (done, cleared) = oneshot::channel();
            commands.send(Clear { uuid: uuid.to_owned(), done }).await.ok();
            if cleared.await.unwrap_or_default() { "cleared" } else { "nothing to clear" }
        }
        None => "unknown command",
    };
    writer.write_all(format!("{reply}\n").as_bytes()).await
}

/// Sends `clear` to the running plugin, and returns whether the GPU had errors.
///
/// # Errors
/// If no plugin runs, or it does not answer.
pub async fn clear(dir: &Path, uuid: &str) -> Result<bool> {
    let exchange = async {
        let mut stream = UnixStream::connect(path(dir)).await?;
        stream.write_all(format!("clear {uuid}\n").as_bytes()).await?;
        let mut reply = String::new();
        stream.take(MAX_LINE).read_to_string(&mut reply).await?;
        match reply.trim_end() {
            "cleared" => Ok(true),
            "nothing to clear" => Ok(false),
            other => Err(io::Error::other(format!("the plugin replied {other:?}"))),
        }
    };
    let result = timeout(PATIENCE, exchange).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
    result.map_err(|error| {
        failure(
            &catalog::SYSTEM,
            format!("cannot clear {uuid:?} in the running plugin: {error}"),
            "start the plugin with \"systemctl start oci-nvidia-kubelet-plugin\"; run this command as root",
        )
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use base::report::ErrorReport;

    #[tokio::test]
    async fn one_line_in_each_direction() {
        let dir = tempfile::tempdir().unwrap();
        let (sender, mut commands) = mpsc::channel::<Clear>(1);
        let served = dir.path().to_owned();
        let server = tokio::spawn(async move { serve(&served, sender).await });
        tokio::spawn(async move {
            while let Some(command) = commands.recv().await {
                command.done.send(command.uuid == "GPU-0").unwrap();
            }
        });
        while std::fs::symlink_metadata(path(dir.path())).is_err() {
            tokio::task::yield_now().await;
        }
        assert!(clear(dir.path(), "GPU-0").await.unwrap());
        assert!(!clear(dir.path(), "GPU-1").await.unwrap());
        let mut strange = UnixStream::connect(path(dir.path())).await.unwrap();
        strange.write_all(&[0xff; 600]).await.ok();
        drop(strange);
        assert!(!clear(dir.path(), "GPU-1").await.unwrap(), "still serves");
        let mode = std::fs::metadata(path(dir.path())).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        server.abort();
        assert!(server.await.unwrap_err().is_cancelled());
        assert!(std::fs::symlink_metadata(path(dir.path())).is_err());
        let error = ErrorReport::new(&clear(dir.path(), "GPU-0").await.unwrap_err());
        assert!(error.line.starts_with("cannot clear \"GPU-0\" in the running plugin: "), "{error:?}");
        assert!(error.hint.starts_with("start the plugin with "), "{error:?}");
    }
}
