//! Restarts with a service manager that stores the driver's sockets, as systemd does.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use kubelet_plugin::dra::pool::Pool;
use kubelet_plugin::kubelet::kept::Keeper;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg, sockopt,
};

use crate::fake_api::FakeApi;
use crate::fake_kubelet::dra::DraKubelet;
use crate::{DRIVER, Driver, Node, SOON, pool};

/// A call that waits has no answer after this time.
const GAP: Duration = Duration::from_secs(1);

tests! {
    &[] => a_call_in_the_gap_is_answered, calls_in_progress_are_answered, a_stop_removes_the_sockets,
        sockets_of_other_settings_are_removed, a_file_that_was_replaced_is_not_ours, removed_sockets_are_not_stored,
        a_driver_that_the_kubelet_refuses_is_not_stored, a_call_waits_for_the_first_answer_of_the_driver;
}

/// The service manager: its socket for messages, what it stores, and the unit that removes files.
struct Manager {
    dir: PathBuf,
    socket: UnixDatagram,
    stored: Vec<(String, OwnedFd)>,
}

impl Manager {
    fn start(dir: &Path) -> Self {
        std::fs::create_dir(dir.join("kept")).unwrap();
        let socket = UnixDatagram::bind(dir.join("notify")).unwrap();
        socket.set_read_timeout(Some(SOON)).unwrap();
        Self {
            dir: dir.to_owned(),
            socket,
            stored: Vec::new(),
        }
    }

    /// What the next process of the service gets.
    fn keeper(&self) -> Keeper {
        let copy = |(name, fd): &(String, OwnedFd)| (name.clone(), fd.try_clone().unwrap());
        let passed = self.stored.iter().map(copy).collect();
        Keeper::new(Some(self.dir.join("notify")), self.dir.join("kept"), passed)
    }

    /// Waits until it has this number of sockets.
    #[track_caller]
    fn wait_for(&mut self, count: usize) {
        while self.stored.len() != count {
            self.receive();
        }
        // The driver removes a link after its message.
        let start = Instant::now();
        while self.links().len() != count {
            assert!(start.elapsed() < SOON, "{:?}", self.links());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn receive(&mut self) {
        let mut text = [0; 512];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut buffer = [IoSliceMut::new(&mut text)];
        let read = recvmsg(
            &self.socket,
            &mut buffer,
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        );
        let read = read.expect("a message of the driver");
        assert!(!read.flags.contains(ReturnFlags::CTRUNC));
        let text = std::str::from_utf8(&text[..read.bytes]).unwrap();
        let value = |key: &str| text.lines().find_map(|line| line.strip_prefix(key));
        let name = value("FDNAME=").unwrap().to_owned();
        assert!(name.len() < 256 && name.chars().all(|c| c.is_ascii_graphic() && c != ':'));
        if value("FDSTOREREMOVE=") == Some("1") {
            return self.stored.retain(|(stored, _)| *stored != name);
        }
        assert_eq!(value("FDSTORE="), Some("1"));
        for message in control.drain() {
            let RecvAncillaryMessage::ScmRights(fds) = message else {
                panic!("{text}");
            };
            for fd in fds {
                if !self.stored.iter().any(|(stored, _)| *stored == name) {
                    self.stored.push((name.clone(), fd));
                }
            }
        }
    }

    fn links(&self) -> Vec<PathBuf> {
        let links = std::fs::read_dir(self.dir.join("kept")).unwrap();
        // One that the driver removes at this moment has no target any more.
        let target = |link: std::fs::DirEntry| std::fs::read_link(link.path()).ok();
        links.filter_map(|link| target(link.unwrap())).collect()
    }

    /// The service ends for good: the descriptors are closed, and the other unit removes the files.
    fn stop(&mut self) {
        self.stored.clear();
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
    let mut manager = Manager::start(dir.path());
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

fn a_call_in_the_gap_is_answered() {
    let (node, mut manager) = start();
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
    assert!(
        !sockets(node.dir.path())
            .iter()
            .any(|socket| socket.exists())
    );
    node.kubelet
        .wait("no driver", SOON, |state| state.drivers.is_empty());
}

/// The administrator has changed the interface, or the directory of the kubelet.
fn sockets_of_other_settings_are_removed() {
    let (node, mut manager) = start();
    node.driver.end();
    manager.keeper().discard();
    manager.wait_for(0);
    assert!(
        !sockets(node.dir.path())
            .iter()
            .any(|socket| socket.exists())
    );

    let (node, mut manager) = start();
    node.driver.end();
    let other = tempfile::tempdir().unwrap();
    let _api = FakeApi::start(other.path());
    let _kubelet = DraKubelet::start(other.path());
    let _driver = Driver::start_with(other.path(), pool(&[None]), manager.keeper());
    let is_ours = |socket: &PathBuf| socket.starts_with(other.path());
    while manager.links().iter().filter(|link| is_ours(link)).count() != 2 {
        manager.receive();
    }
    manager.wait_for(2);
    assert!(
        !sockets(node.dir.path())
            .iter()
            .any(|socket| socket.exists())
    );
}

/// For example `kubeadm reset` has removed the directory of the kubelet.
fn a_file_that_was_replaced_is_not_ours() {
    let (node, mut manager) = start();
    let Node {
        driver,
        kubelet,
        api: _api,
        dir,
    } = node;
    driver.end();
    let passed = manager.keeper();
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
    let old: Vec<_> = manager
        .stored
        .iter()
        .map(|(name, _)| name.clone())
        .collect();
    let is_old = |(name, _): &(String, OwnedFd)| old.contains(name);
    while manager.stored.len() != 2 || manager.stored.iter().any(is_old) {
        manager.receive();
    }
    drop(driver);
}

fn removed_sockets_are_not_stored() {
    let (node, mut manager) = start();
    let before = manager.stored[0].0.clone();
    std::fs::remove_file(&sockets(node.dir.path())[0]).unwrap();
    node.kubelet
        .wait("registered again", SOON, |state| state.registrations == 2);
    while manager.stored.iter().any(|(name, _)| *name == before) {
        manager.receive();
    }
    manager.wait_for(2);
}

fn a_driver_that_the_kubelet_refuses_is_not_stored() {
    let (node, mut manager) = start();
    node.driver.registered.send_replace(Some(false));
    manager.wait_for(0);
    node.driver.end();
    assert!(
        !sockets(node.dir.path())
            .iter()
            .any(|socket| socket.exists())
    );
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
    for (_, fd) in &manager.stored {
        assert!(sockopt::socket_acceptconn(fd).unwrap());
    }
}
