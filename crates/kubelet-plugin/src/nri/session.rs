//! The conversation with an engine on one socket: from its bytes to ours. Pure.
//!
//! We register, the engine configures us, reports its pods and containers in one or more messages, and then asks about each container that
//! it creates. It sends the next message while it processes our answer, so their order is not fixed.

use anyhow::{Result, bail};
use prost::Message;

use super::framing::FrameReader;
use super::mux;
use super::ttrpc::{self, Code};
use crate::model::Refusal;
use crate::proto::nri::{
    ConfigureRequest, ConfigureResponse, CreateContainerRequest, CreateContainerResponse,
    RegisterPluginRequest, SynchronizeRequest, SynchronizeResponse,
};
use crate::proto::ttrpc::{Request, Response};

/// The service that the engine calls.
const PLUGIN_SERVICE: &str = "nri.pkg.api.v1alpha1.Plugin";
/// The service of the engine.
const RUNTIME_SERVICE: &str = "nri.pkg.api.v1alpha1.Runtime";
/// The version of NRI whose messages we know, for the log of the engine.
const VERSION: &str = "0.12.0";
/// The number of our only call. Clients use odd numbers.
const REGISTRATION: u32 = 1;
/// How long an engine may take to accept our registration, in nanoseconds.
const REGISTRATION_TIME: i64 = 5_000_000_000;
/// The bit of the event `CREATE_CONTAINER`. An engine calls its plugins only for events that they subscribe to.
const CREATE_CONTAINER: i32 = 1 << 3;

/// The name of a plugin and its place among the plugins of an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The name
    pub name: String,
    /// Two digits
    pub index: String,
}

/// Answers the questions of the engine. The engine waits for the answer, so it comes from memory.
pub trait Plugin {
    /// Returns what a container gets in addition.
    ///
    /// # Errors
    /// If the container must not start.
    fn create_container(
        &self,
        request: &CreateContainerRequest,
    ) -> Result<CreateContainerResponse, Refusal>;
}

/// A conversation with an engine.
#[derive(Clone, Debug)]
pub struct Session {
    trunk: FrameReader<{ mux::HEADER }>,
    plugin: FrameReader<{ ttrpc::HEADER }>,
    runtime: FrameReader<{ ttrpc::HEADER }>,
    engine: Option<String>,
}

impl Session {
    /// Starts a conversation. Returns it with the first bytes for the engine.
    #[must_use]
    pub fn start(identity: &Identity) -> (Self, Vec<u8>) {
        let register = RegisterPluginRequest {
            plugin_name: identity.name.clone(),
            plugin_idx: identity.index.clone(),
            nri_version: VERSION.to_owned(),
        };
        let request = Request {
            service: RUNTIME_SERVICE.to_owned(),
            method: "RegisterPlugin".to_owned(),
            payload: register.encode_to_vec(),
            timeout_nano: REGISTRATION_TIME,
        };
        let mut output = Vec::new();
        mux::write(
            mux::RUNTIME,
            &ttrpc::request(REGISTRATION, &request),
            &mut output,
        );
        let session = Self {
            trunk: mux::reader(),
            plugin: ttrpc::reader(),
            runtime: ttrpc::reader(),
            engine: None,
        };
        (session, output)
    }

    /// Returns the name and the version of the engine after it has configured us.
    #[must_use]
    pub fn engine(&self) -> Option<&str> {
        self.engine.as_deref()
    }

    /// Takes bytes of the engine, and appends the answers to `output`.
    ///
    /// # Errors
    /// If the engine refuses the registration, or what it sends is not NRI. The connection must be closed.
    pub fn receive(
        &mut self,
        bytes: &[u8],
        plugin: &impl Plugin,
        output: &mut Vec<u8>,
    ) -> Result<()> {
        for (header, payload) in self.trunk.push(bytes)? {
            match mux::connection(header) {
                mux::PLUGIN => self.serve(&payload, plugin, output)?,
                mux::RUNTIME => self.check_registration(&payload)?,
                // Engines ignore connections that they do not know, too.
                _ => {}
            }
        }
        Ok(())
    }

    fn serve(&mut self, bytes: &[u8], plugin: &impl Plugin, output: &mut Vec<u8>) -> Result<()> {
        for (header, payload) in self.plugin.push(bytes)? {
            let Some(id) = ttrpc::request_id(header) else {
                continue;
            };
            let result = match Request::decode(payload.as_slice()) {
                Ok(request) => self.answer(&request, plugin),
                Err(error) => Err((Code::InvalidArgument, error.to_string())),
            };
            mux::write(mux::PLUGIN, &ttrpc::response(id, result), output);
        }
        Ok(())
    }

    fn answer(
        &mut self,
        request: &Request,
        plugin: &impl Plugin,
    ) -> Result<Vec<u8>, (Code, String)> {
        if request.service != PLUGIN_SERVICE {
            return Err((
                Code::Unimplemented,
                format!("unknown service {:?}", request.service),
            ));
        }
        match request.method.as_str() {
            "Configure" => {
                let ConfigureRequest {
                    runtime_name,
                    runtime_version,
                } = decode(&request.payload)?;
                self.engine = Some(format!("{runtime_name} {runtime_version}"));
                Ok(ConfigureResponse {
                    events: CREATE_CONTAINER,
                }
                .encode_to_vec())
            }
            "Synchronize" => {
                let SynchronizeRequest { more } = decode(&request.payload)?;
                Ok(SynchronizeResponse { more }.encode_to_vec())
            }
            "CreateContainer" => {
                let answer = plugin.create_container(&decode(&request.payload)?);
                let answer =
                    answer.map_err(|refusal| (Code::FailedPrecondition, refusal.to_string()))?;
                Ok(answer.encode_to_vec())
            }
            "Shutdown" => Ok(Vec::new()),
            other => Err((Code::Unimplemented, format!("unknown method {other:?}"))),
        }
    }

    fn check_registration(&mut self, bytes: &[u8]) -> Result<()> {
        for (header, payload) in self.runtime.push(bytes)? {
            if ttrpc::response_id(header) != Some(REGISTRATION) {
                continue;
            }
            match Response::decode(payload.as_slice())?.status {
                Some(status) if status.code != 0 => {
                    bail!("the engine refuses the registration: {}", status.message)
                }
                _ => {}
            }
        }
        Ok(())
    }
}

fn decode<T: Message + Default>(payload: &[u8]) -> Result<T, (Code, String)> {
    T::decode(payload).map_err(|error| (Code::InvalidArgument, error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::nri::{CdiDevice, Container, ContainerAdjustment};
    use proptest::prelude::*;

    /// Gives each container a device with its name, except one.
    struct Named;

    impl Plugin for Named {
        fn create_container(
            &self,
            request: &CreateContainerRequest,
        ) -> Result<CreateContainerResponse, Refusal> {
            let name = request.container.clone().unwrap_or_default().name;
            if name == "bad" {
                return Err(Refusal::new("it is bad"));
            }
            Ok(CreateContainerResponse {
                adjust: Some(ContainerAdjustment {
                    cdi_devices: vec![CdiDevice { name }],
                }),
            })
        }
    }

    fn session() -> Session {
        Session::start(&Identity {
            name: "test".to_owned(),
            index: "10".to_owned(),
        })
        .0
    }

    fn receive(session: &mut Session, bytes: &[u8]) -> Result<Vec<u8>> {
        let mut output = Vec::new();
        session.receive(bytes, &Named, &mut output).map(|()| output)
    }

    fn call(id: u32, method: &str, payload: Vec<u8>) -> Vec<u8> {
        call_of(PLUGIN_SERVICE, id, method, payload)
    }

    fn call_of(service: &str, id: u32, method: &str, payload: Vec<u8>) -> Vec<u8> {
        let request = Request {
            service: service.to_owned(),
            method: method.to_owned(),
            payload,
            timeout_nano: 2_000_000_000,
        };
        let mut bytes = Vec::new();
        mux::write(mux::PLUGIN, &ttrpc::request(id, &request), &mut bytes);
        bytes
    }

    fn create(id: u32, name: &str) -> Vec<u8> {
        let container = Some(Container {
            name: name.to_owned(),
            ..Container::default()
        });
        call(
            id,
            "CreateContainer",
            CreateContainerRequest {
                container,
                pod: None,
            }
            .encode_to_vec(),
        )
    }

    /// The numbers of the calls and their responses.
    fn answers(bytes: &[u8]) -> Vec<(u32, Response)> {
        let (mut trunk, mut plugin) = (mux::reader(), ttrpc::reader());
        let mut found = Vec::new();
        for (_, payload) in trunk.push(bytes).unwrap() {
            for (header, payload) in plugin.push(&payload).unwrap() {
                found.push((
                    ttrpc::response_id(header).unwrap(),
                    Response::decode(payload.as_slice()).unwrap(),
                ));
            }
        }
        found
    }

    #[test]
    fn the_bytes_of_a_registration() {
        let (_, bytes) = Session::start(&Identity {
            name: "n".to_owned(),
            index: "10".to_owned(),
        });
        let header = [0, 0, 0, 2, 0, 0, 0, 79, 0, 0, 0, 69, 0, 0, 0, 1, 1, 0];
        assert_eq!(
            bytes[..18],
            header,
            "the connection, two lengths, the call, its kind"
        );
        assert_eq!(&bytes[18..20], [0x0a, 28]);
        assert_eq!(&bytes[20..48], b"nri.pkg.api.v1alpha1.Runtime");
        assert_eq!(&bytes[50..64], b"RegisterPlugin");
        assert_eq!(&bytes[64..81], b"\x1a\x0f\x0a\x01n\x12\x0210\x1a\x060.12.0");
    }

    #[test]
    fn calls_are_answered() {
        let mut session = session();
        let configure = ConfigureRequest {
            runtime_name: "x".to_owned(),
            runtime_version: "1".to_owned(),
        };
        let mut input = call(1, "Configure", configure.encode_to_vec());
        input.extend(call(
            3,
            "Synchronize",
            SynchronizeRequest { more: true }.encode_to_vec(),
        ));
        input.extend(
            [
                create(5, "good"),
                create(7, "bad"),
                call(9, "New", Vec::new()),
            ]
            .concat(),
        );
        input.extend(call(11, "CreateContainer", vec![0xff]));
        let found = answers(&receive(&mut session, &input).unwrap());
        assert_eq!(session.engine(), Some("x 1"));
        let codes: Vec<_> = found
            .iter()
            .map(|(id, answer)| (*id, answer.status.clone().map(|status| status.code)))
            .collect();
        assert_eq!(
            codes,
            [
                (1, None),
                (3, None),
                (5, None),
                (7, Some(9)),
                (9, Some(12)),
                (11, Some(3))
            ]
        );
        assert_eq!(found[0].1.payload, [0x10, 8]);
        assert_eq!(found[1].1.payload, [0x10, 1]);
        assert_eq!(found[2].1.payload, b"\x0a\x08\x42\x06\x0a\x04good");
        assert_eq!(found[3].1.status.as_ref().unwrap().message, "it is bad");
    }

    #[test]
    fn calls_to_another_service_are_refused() {
        for service in [RUNTIME_SERVICE, "", "nri.pkg.api.v1beta1.Plugin"] {
            let mut session = session();
            let configure = ConfigureRequest::default().encode_to_vec();
            let input = call_of(service, 1, "Configure", configure);
            let found = answers(&receive(&mut session, &input).unwrap());
            let status = found[0].1.status.clone().unwrap();
            assert_eq!(status.code, 12, "{service}");
            assert_eq!(session.engine(), None, "{service}");
        }
    }

    #[test]
    fn large_answers_are_sent_in_pieces() {
        let name = "x".repeat(10_000);
        let mut session = session();
        let output = receive(&mut session, &create(1, &name)).unwrap();
        let frames = mux::reader().push(&output).unwrap();
        assert!(frames.len() == 3 && frames.iter().all(|(_, payload)| payload.len() <= 4096));
        assert_eq!(answers(&output).len(), 1);
    }

    #[test]
    fn messages_have_a_limit() {
        let mut session = session();
        let error = receive(&mut session, &[0, 0, 0, 1, 0, 0x40, 0, 11])
            .unwrap_err()
            .to_string();
        assert_eq!(
            error,
            "a message has 4194315 bytes, at most 4194314 are allowed"
        );
        let mut session = self::session();
        let mut bytes = Vec::new();
        mux::write(mux::PLUGIN, &[0, 0x40, 0, 1, 0, 0, 0, 1, 1, 0], &mut bytes);
        let error = receive(&mut session, &bytes).unwrap_err().to_string();
        assert_eq!(
            error,
            "a message has 4194305 bytes, at most 4194304 are allowed"
        );
    }

    #[test]
    fn a_refused_registration() {
        let refuse = |code| {
            let mut bytes = Vec::new();
            let response = Err((code, "no".to_owned()));
            mux::write(
                mux::RUNTIME,
                &ttrpc::response(REGISTRATION, response),
                &mut bytes,
            );
            bytes
        };
        let error = receive(&mut session(), &refuse(Code::InvalidArgument))
            .unwrap_err()
            .to_string();
        assert_eq!(error, "the engine refuses the registration: no");
    }

    /// Everything until the error, if there is one.
    fn output(pieces: &[&[u8]]) -> (Vec<u8>, Option<String>) {
        let mut session = session();
        let mut output = Vec::new();
        // An error can follow complete messages.
        for piece in pieces.iter().copied().chain([&[][..]; 3]) {
            if let Err(error) = session.receive(piece, &Named, &mut output) {
                return (output, Some(error.to_string()));
            }
        }
        (output, None)
    }

    proptest! {
        #[test]
        fn any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..200), connection in 0_u32..4) {
            receive(&mut session(), &bytes).ok();
            let mut framed = Vec::new();
            mux::write(connection, &bytes, &mut framed);
            receive(&mut session(), &framed).ok();
            for method in ["Configure", "Synchronize", "CreateContainer", "Shutdown"] {
                let output = receive(&mut session(), &call(1, method, bytes.clone())).unwrap();
                prop_assert_eq!(answers(&output).len(), 1, "each call has an answer");
            }
        }

        /// The answers do not depend on how the bytes arrive.
        #[test]
        fn pieces_are_like_the_whole(
            calls in prop::collection::vec(("[a-z]{0,9}|bad", any::<bool>()), 1..5),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..3),
            size in 1_usize..40,
        ) {
            let mut bytes = Vec::new();
            for (at, (name, known)) in (0_u32..).zip(&calls) {
                let id = 2 * at + 1;
                bytes.extend(if *known { create(id, name) } else { call(id, name, Vec::new()) });
            }
            for (index, byte) in changes {
                let at = index.index(bytes.len());
                bytes[at] = byte;
            }
            let pieces: Vec<&[u8]> = bytes.chunks(size).collect();
            prop_assert_eq!(output(&pieces).0, output(&[&bytes]).0);
            prop_assert_eq!(output(&pieces).1.is_some(), output(&[&bytes]).1.is_some());
        }
    }
}
