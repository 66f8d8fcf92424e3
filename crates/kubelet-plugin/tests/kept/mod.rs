//! Restarts with a service manager that stores the driver's sockets, as systemd does.

use std::env;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use kubelet_plugin::dra::pool::Pool;
use kubelet_plugin::kubelet::kept::Keeper;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SocketAddrUnix, getsockname,
    recvmsg, sockopt,
};

use crate::fake_api::FakeApi;
use crate::fake_kubelet::dra::DraKubelet;
use crate::{DRIVER, Driver, Node, SOON, pool};

/// A call that waits has no answer after this time.
const GAP: Duration = Duration::from_secs(1);
/// The socket of the service manager, in the environment of the process that runs the tests
const MANAGER: &str = "ONH_TEST_NOTIFY_SOCKET";

tests! {
    &[] => a_call_in_the_gap_is_answered, calls_in_progress_are_answered, a_stop_removes_the_sockets,
        sockets_of_other_settings_are_removed, a_file_that_was_replaced_is_not_ours, removed_sockets_are_not_stored,
        a_driver_that_the_kubelet_refuses_is_not_stored, a_call_waits_for_the_first_answer_of_the_driver;
}

/// What the service manager stores for the drivers of all tests, because the environment of the process names one manager.
static STORED: Mutex<Vec<Stored>> = Mutex::new(Vec::new());

#[derive(Debug)]
struct Stored {
    name: String,
    fd: OwnedFd,
    path: PathBuf,
}

/// Runs the tests in another process, whose NOTIFY_SOCKET is the one of the service manager here.
pub fn run_with_manager(run: impl FnOnce() -> ExitCode) -> ExitCode {
    if let Some(path) = env::var_os(MANAGER) {
        let socket = UnixDatagram::bind(path).unwrap();
        std::thread::spawn(move || {
            loop {
                receive(&socket);
            }
        });
        return run();
    }
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("notify");
    let mut tests = Command::new(env::current_exe().unwrap());
    tests.args(env::args_os().skip(1));
    tests.env("NOTIFY_SOCKET", &socket).env(MANAGER, &socket);
    let code = tests.status().unwrap().code();
    code.map_or(ExitCode::FAILURE, |code| {
        ExitCode::from(u8::try_from(code).unwrap())
    })
}

/// Does what a message of a driver asks for.
fn receive(socket: &UnixDatagram) {
    let mut text = [0; 512];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut buffer = [IoSliceMut::new(&mut text)];
    let read = recvmsg(socket, &mut buffer, &mut control, RecvFlags::CMSG_CLOEXEC);
    let read = read.expect("a message of the driver");
    assert!(!read.flags.contains(ReturnFlags::CTRUNC));
    let text = std::str::from_utf8(&text[..read.bytes]).unwrap();
    let value = |key: &str| text.lines().find_map(|line| line.strip_prefix(key));
    let name = value("FDNAME=").unwrap().to_owned();
    assert!(name.len() < 256 && name.chars().all(|c| c.is_ascii_graphic() && c != ':'));
    let mut stored = STORED.lock().unwrap();
    if value("FDSTOREREMOVE=") == Some("1") {
        return stored.retain(|stored| stored.name != name);
    }
    assert_eq!(value("FDSTORE="), Some("1"));
    for message in control.drain() {
        let RecvAncillaryMessage::ScmRights(fds) = message else {
            panic!("{text}");
        };
        for fd in fds {
            if !stored.iter().any(|stored| stored.name == name) {
                let address = SocketAddrUnix::try_from(getsockname(&fd).unwrap()).unwrap();
                let path = String::from_utf8(address.path_bytes().unwrap().to_vec()).unwrap();
                stored.push(Stored {
                    name: name.clone(),
                    fd,
                    path: path.into(),
                });
            }
        }
    }
}

/// The service manager of a test: the unit that removes files, and what is stored of the sockets in some directories.
struct Manager {
    links: PathBuf,
    dirs: Vec<PathBuf>,
}

impl Manager {
    fn start(dir: &Path) -> Self {
        let links = dir.join("kept");
        std::fs::create_dir(&links).unwrap();
        Self {
            links,
            dirs: vec![dir.to_owned()],
        }
    }

    /// What the next process of the service gets.
    fn keeper(&self) -> Keeper {
        Keeper::new(Some(self.links.clone()), self.stored())
    }

    fn stored(&self) -> Vec<(String, OwnedFd)> {
        let mut found = Vec::new();
        for Stored { name, fd, path } in STORED.lock().unwrap().iter() {
            if self.dirs.iter().any(|dir| path.starts_with(dir)) {
                found.push((name.clone(), fd.try_clone().unwrap()));
            }
        }
        found
    }

    fn names(&self) -> Vec<String> {
        self.stored().into_iter().map(|(name, _)| name).collect()
    }

    /// Waits until it has this number of sockets, with a link to each.
    #[track_caller]
    fn wait_for(&self, count: usize) {
        self.until(|manager| manager.names().len() == count && manager.links().len() == count);
    }

    #[track_caller]
    fn until(&self, is: impl Fn(&Self) -> bool) {
        let start = Instant::now();
        while !is(self) {
            let state = (self.names(), self.links());
            assert!(start.elapsed() < SOON, "{state:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn links(&self) -> Vec<PathBuf> {
        let links = std::fs::read_dir(&self.links).unwrap();
        // One that the driver removes at this moment has no target any more.
        let target = |link: std::fs::DirEntry| std::fs::read_link(link.path()).ok();
        links.filter_map(|link| target(link.unwrap())).collect()
    }

    /// The service ends for good: the descriptors are closed, and the other unit removes the files.
    fn stop(&self) {
        let is_ours = |stored: &Stored| self.dirs.iter().any(|dir| stored.path.starts_with(dir));
        STORED.lock().unwrap().retain(|stored| !is_ours(stored));
        for file in self.links() {
            std::fs::remove_file(file).unwrap();
        }
    }
}

/// A node whose driver has a service manager, which stores both sockets.
fn start() -> (Node, Manager) {
    let dir = tempfile::tempdir().unwrap();
    let api = FakeApi::start(dir.path());
    let kubelet = DraKubelet::start(dir.path());
    let manager = Manager::start(dir.path());
    let driver = Driver::start_with(dir.path(), pool(&[None, None]), manager.keeper());
    manager.wait_for(2);
    let node = Node {
        driver,
        kubelet,
        api,
        dir,
    };
    node.api
        .wait("the devices", SOON, |state| state.devices().len() == 2);
    node.api.state().allocate("train", "u-1", &["gpu-1"]);
    (node, manager)
}

/// Has the driver prepare the claim, while the test goes on. Returns the error in the answer.
fn prepare(kubelet: &Arc<DraKubelet>) -> mpsc::Receiver<Result<String, String>> {
    let (sender, receiver) = mpsc::channel();
    let kubelet = Arc::clone(kubelet);
    std::thread::spawn(move || {
        let answer = kubelet.try_prepare(DRIVER, &[("train", "u-1")]);
        let error = answer.map(|mut answer| answer.remove("u-1").unwrap().error);
        let _ = sender.send(error);
    });
    receiver
}

fn sockets(dir: &Path) -> [PathBuf; 2] {
    let registry = dir.join("plugins_registry");
    [
        registry.join(format!("{DRIVER}-reg.sock")),
        crate::dra_socket(dir),
    ]
}

fn has_sockets(dir: &Path) -> bool {
    sockets(dir).iter().any(|socket| socket.exists())
}

fn a_call_in_the_gap_is_answered() {
    let (node, manager) = start();
    let Node {
        driver,
        kubelet,
        api: _api,
        dir,
    } = node;
    let kubelet = Arc::new(kubelet);
    driver.end();
    assert!(sockets(dir.path()).iter().all(|socket| socket.exists()));
    let answer = prepare(&kubelet);
    assert!(answer.recv_timeout(GAP).is_err(), "no process answers");
    // A process that is killed leaves what was stored, too.
    for _ in 0..2 {
        let driver = Driver::start_with(dir.path(), pool(&[None, None]), manager.keeper());
        assert_eq!(
            prepare(&kubelet).recv_timeout(SOON).unwrap(),
            Ok(String::new())
        );
        assert!(driver.is_registered());
        drop(driver);
    }
    assert_eq!(answer.recv_timeout(SOON).unwrap(), Ok(String::new()));
    let state = kubelet.state();
    assert_eq!((state.registrations, state.drivers.len()), (1, 1));
    manager.stop();
    kubelet.wait("no driver", SOON, |state| state.drivers.is_empty());
}

fn calls_in_progress_are_answered() {
    let (node, _manager) = start();
    let kubelet = Arc::new(node.kubelet);
    // The stream of the health must not delay the end.
    kubelet.wait("health", SOON, |state| state.health.len() == 2);
    let before = node.api.state().count("GET", "resourceclaims");
    node.api.state().delay = Duration::from_millis(800);
    let answer = prepare(&kubelet);
    node.api.wait("the question", SOON, |state| {
        state.count("GET", "resourceclaims") > before
    });
    let start = Instant::now();
    node.driver.end();
    let took = start.elapsed();
    assert_eq!(answer.recv_timeout(SOON).unwrap(), Ok(String::new()));
    assert!(took < SOON, "{took:?}");
}

/// Without a service manager, as in a pod, the files go with the process.
fn a_stop_removes_the_sockets() {
    let node = Node::start();
    node.driver.end();
    assert!(!has_sockets(node.dir.path()));
    node.kubelet
        .wait("no driver", SOON, |state| state.drivers.is_empty());
}

/// The administrator has changed the interface, or the directory of the kubelet.
fn sockets_of_other_settings_are_removed() {
    let (node, manager) = start();
    node.driver.end();
    manager.keeper().discard();
    manager.wait_for(0);
    assert!(!has_sockets(node.dir.path()));

    let (node, mut manager) = start();
    node.driver.end();
    let other = tempfile::tempdir().unwrap();
    let _api = FakeApi::start(other.path());
    let _kubelet = DraKubelet::start(other.path());
    let _driver = Driver::start_with(other.path(), pool(&[None]), manager.keeper());
    let is_ours = |socket: &PathBuf| socket.starts_with(other.path());
    manager.dirs.push(other.path().to_owned());
    manager.until(|manager| manager.links().iter().filter(|link| is_ours(link)).count() == 2);
    manager.wait_for(2);
    assert!(!has_sockets(node.dir.path()));
}

/// For example `kubeadm reset` has removed the directory of the kubelet.
fn a_file_that_was_replaced_is_not_ours() {
    let (node, manager) = start();
    let Node {
        driver,
        kubelet,
        api: _api,
        dir,
    } = node;
    driver.end();
    let (passed, old) = (manager.keeper(), manager.names());
    assert_eq!(passed.waiting().len(), 2);
    for socket in sockets(dir.path()) {
        std::fs::remove_file(&socket).unwrap();
        drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    }
    assert_eq!(passed.waiting(), []);
    let driver = Driver::start_with(dir.path(), pool(&[None, None]), passed);
    kubelet.wait("registered again", SOON, |state| {
        state.registrations == 2 && state.drivers.len() == 1
    });
    manager.until(|manager| {
        let names = manager.names();
        names.len() == 2 && !names.iter().any(|name| old.contains(name))
    });
    drop(driver);
}

fn removed_sockets_are_not_stored() {
    let (node, manager) = start();
    let before = manager.names().remove(0);
    std::fs::remove_file(&sockets(node.dir.path())[0]).unwrap();
    node.kubelet
        .wait("registered again", SOON, |state| state.registrations == 2);
    manager.until(|manager| !manager.names().contains(&before));
    manager.wait_for(2);
}

fn a_driver_that_the_kubelet_refuses_is_not_stored() {
    let (node, manager) = start();
    node.driver.registered.send_replace(Some(false));
    manager.wait_for(0);
    node.driver.end();
    assert!(!has_sockets(node.dir.path()));
}

fn a_call_waits_for_the_first_answer_of_the_driver() {
    let (node, manager) = start();
    let Node {
        driver,
        kubelet,
        api: _api,
        dir,
    } = node;
    let kubelet = Arc::new(kubelet);
    driver.end();
    let driver = Driver::start_with(dir.path(), Pool::default(), manager.keeper());
    let answer = prepare(&kubelet);
    assert!(answer.recv_timeout(GAP).is_err());
    driver.set(&[None, None]);
    assert_eq!(answer.recv_timeout(SOON).unwrap(), Ok(String::new()));
    // A socket that no process serves is not passed to programs.
    for (_, fd) in manager.stored() {
        assert!(sockopt::socket_acceptconn(&fd).unwrap());
    }
}
