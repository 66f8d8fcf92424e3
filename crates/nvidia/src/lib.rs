//! The NVIDIA driver and GPUs of a host, and what a container has to get of them, as data.
//!
//! It knows no container, no engine and no OCI hook: capabilities and device names go in, [`edits::Edits`] or a CDI spec
//! come out.
//!
//! | module | what it does |
//! |---|---|
//! | [`capability`], [`device_id`], [`bus_id`], [`require`] | the words of NVIDIA's image convention |
//! | [`limit_entry`] | the entries of `[devices]` in config.toml |
//! | [`config`] | config.toml |
//! | [`driver`] | the driver's files, sockets and device nodes, found below the driver root |
//! | [`nvml`], [`inventory`] | the GPUs, by NVML and by the kernel module |
//! | [`prepare`] | loads the modules and makes the device nodes |
//! | [`host`] | all of these together |
//! | [`edits`] | what a container gets |
//! | [`cdi`] | edits as a CDI spec |

pub mod bus_id;
pub mod capability;
pub mod cdi;
pub mod config;
pub mod device_id;
pub mod driver;
pub mod edits;
pub mod host;
pub mod inventory;
pub mod limit_entry;
pub mod nvml;
pub mod prepare;
pub mod require;
pub mod timeouts;
