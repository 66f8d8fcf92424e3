//! Gives GPUs to containers that request them with a variable or a mount, as a plugin of engines: NRI, the Node Resource Interface. The
//! engine adds CDI devices to config.json before the runtime starts, so no hook is needed.
//!
//! | module | what it does |
//! |---|---|
//! | [`grant`] | decides what a container gets |
//! | [`session`] | the conversation with an engine |
//! | [`ttrpc`], [`mux`], [`framing`] | the protocol: calls, connections, frames |
//! | [`engine`] | connects to the socket of an engine, again and again |
//! | [`answer`] | answers from the state of the node |
//! | [`record`] | records the containers that do not get what they request |

pub mod answer;
pub mod engine;
pub mod framing;
pub mod grant;
pub mod mux;
pub mod record;
pub mod session;
pub mod ttrpc;
