//! The NVIDIA driver and the GPUs of a host, and what a container needs of them, as data.
//!
//! The crate does not know containers, engines or OCI hooks. Capabilities and device names go in; [`edits::Edits`] or a CDI
//! spec come out. Nothing here changes a container, and nothing but [`prepare`] changes the host.
//!
//! # The way to edits
//!
//! 1. [`config::read`] reads config.toml. A [`config::Config`] can also be made without a file.
//! 2. [`host::Host::look_with`] finds the driver and takes the [`inventory::Inventory`]: GPUs and MIG devices that work, and those
//!    that do not, with the reason.
//! 3. [`inventory::select`] chooses devices by index, UUID or bus address within the administrator's limits.
//! 4. [`host::Host::edits`] returns files, device nodes, links and masks. It gathers facts first, as
//!    [`edits::facts::HostFacts`]; [`edits::decide`] makes edits of them without reading anything.
//! 5. [`cdi`] makes a CDI spec of edits; [`cdi::of_host`] does all of this for all devices of the host.
//!
//! ```no_run
//! use std::path::Path;
//!
//! use nvidia_host::edits::Wanted;
//! use nvidia_host::host::{Host, LookOptions};
//! use nvidia_host::inventory::select::permitted_devices;
//!
//! # fn main() -> anyhow::Result<()> {
//! let (config, _findings) = nvidia_host::config::read(None)?;
//! let program = Path::new("/usr/bin/oci-nvidia-hook");
//! let options = LookOptions { nvml_program: Some(program), ..LookOptions::default() };
//! let host = Host::look_with(&config, options, &|| ())?;
//! for failed in &host.inventory.failed {
//!     eprintln!("{failed}");
//! }
//! let devices = permitted_devices(&host.inventory, &config.devices);
//! let wanted = Wanted { capabilities: config.supported_driver_capabilities, gpus: true, ..Wanted::default() };
//! let (edits, _findings) = host.edits(&wanted, &devices)?;
//! println!("{} device nodes", edits.nodes.len());
//! # Ok(())
//! # }
//! ```
//!
//! # Threads
//!
//! The types are `Send` and `Sync`, and every call blocks. A program with threads has to set
//! [`host::LookOptions::nvml_program`]: without it, NVML is asked in a forked child, which only a program with one thread may do.
//!
//! # Modules
//!
//! | module | what it does |
//! |---|---|
//! | [`capability`], [`device_id`], [`bus_id`], [`require`] | the words of NVIDIA's image convention |
//! | [`limit_entry`] | the entries of `[devices]` in config.toml |
//! | [`config`] | config.toml |
//! | [`driver`] | the driver's files, sockets and device nodes below the driver root |
//! | [`nvml`], [`inventory`] | the GPUs according to NVML and to the kernel module |
//! | [`prepare`] | loads the modules and creates the device nodes |
//! | [`host`] | finds the driver and gathers facts |
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

/// A daemon keeps these between threads.
const _: () = {
    const fn is_shared_between_threads<T: Send + Sync>() {}
    is_shared_between_threads::<base::tree::Tree>();
    is_shared_between_threads::<config::Config>();
    is_shared_between_threads::<host::Host>();
    is_shared_between_threads::<inventory::Inventory>();
    is_shared_between_threads::<edits::facts::HostFacts>();
    is_shared_between_threads::<edits::Edits>();
    is_shared_between_threads::<inventory::cache::Cache>();
};
