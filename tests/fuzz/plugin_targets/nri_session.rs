//! The bytes of an engine on an NRI socket.

use kubelet_plugin::model::Refusal;
use kubelet_plugin::nri::session::{Identity, Plugin, Session};
use kubelet_plugin::nri::{mux, ttrpc};
use kubelet_plugin::proto::nri::{CreateContainerRequest, CreateContainerResponse};

/// Refuses containers without a name.
struct Named;

impl Plugin for Named {
    fn create_container(
        &self,
        request: &CreateContainerRequest,
    ) -> Result<CreateContainerResponse, Refusal> {
        let name = request
            .container
            .as_ref()
            .map(|container| container.name.as_str());
        if name.is_none_or(str::is_empty) {
            return Err(Refusal::new("it has no name"));
        }
        Ok(CreateContainerResponse::default())
    }
}

/// Receives the bytes at once and in pieces, whose size is the first byte. Each answer is a message of the protocol.
pub fn run(data: &[u8]) {
    let Some((size, bytes)) = data.split_first() else {
        return;
    };
    let pieces: Vec<&[u8]> = bytes.chunks(usize::from(*size).max(1)).collect();
    let (answers, is_closed) = receive(&pieces);
    assert_eq!(
        receive(&[bytes]),
        (answers.clone(), is_closed),
        "the borders of reads do not matter"
    );
    let (mut trunk, mut plugin) = (mux::reader(), ttrpc::reader());
    for (header, payload) in trunk.push(&answers).expect("frames") {
        assert_eq!(mux::connection(header), mux::PLUGIN);
        for (header, _) in plugin.push(&payload).expect("messages") {
            assert!(ttrpc::response_id(header).is_some(), "{header:?}");
        }
    }
}

/// Returns the answers, and whether the connection must be closed.
fn receive(pieces: &[&[u8]]) -> (Vec<u8>, bool) {
    let identity = Identity {
        name: "fuzz".to_owned(),
        index: "10".to_owned(),
    };
    let (mut session, _) = Session::start(&identity);
    let mut output = Vec::new();
    // An empty read reports a frame that is too long after others.
    for piece in pieces.iter().chain(&[&b""[..]]) {
        if session.receive(piece, &Named, &mut output).is_err() {
            return (output, true);
        }
    }
    (output, false)
}
