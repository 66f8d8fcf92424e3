//! Finds the NVIDIA driver and the GPUs of a host, and determines what a container needs of them, as data.
//!
//! The crate does not know OCI hooks, engines or config.json. Its input are driver capabilities and device names, its output is
//! [`edits::Edits`] or a CDI spec. Of containers it knows only the rules by which they request GPUs ([`request`]). Nothing in it
//! changes a container, and only [`prepare`] changes the host.
//!
//! # From a request to edits
//!
//! 1. [`config::read`] reads config.toml. A [`config::Config`] can also be created without a file.
//! 2. [`host::Host::inspect`] finds the driver and takes the [`inventory::Inventory`]: GPUs and MIG devices that work, and
//!    those that do not work, with the reason.
//! 3. [`inventory::select`] selects devices by index, UUID or bus address, within the administrator's limits.
//! 4. [`host::Host::edits`] returns files, device nodes, links and masks. It gathers facts first, as
//!    [`edits::facts::HostFacts`]; [`edits::decide`] turns them into edits without reading anything.
//! 5. [`cdi`] turns edits into a CDI spec; [`cdi::of_host`] does all of this for all devices of the host.
//!
//! ```no_run
//! use nvidia_host::edits::Wanted;
//! use nvidia_host::host::Host;
//! use nvidia_host::inventory::select::permitted_devices;
//!
//! # fn main() -> anyhow::Result<()> {
//! let (config, _findings) = nvidia_host::config::read(None)?;
//! let host = Host::inspect(&config, &|| ())?;
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
//! The types are `Send` and `Sync`, and every call blocks. [`host::Host::inspect`] forks before it starts the program that calls NVML,
//! which is only permitted in a program with one thread. A program with threads starts it in its own way ([`nvml::program`]), and passes
//! the answer to [`host::Driver::host`].
//!
//! # Modules
//!
//! | module | what it does |
//! |---|---|
//! | [`capability`], [`device_id`], [`bus_id`], [`decimal`], [`require`] | the environment variables of NVIDIA's images |
//! | [`limit_entry`] | the entries of `[devices]` in config.toml |
//! | [`config`] | config.toml |
//! | [`driver`] | the driver's files, sockets and device nodes below the driver root |
//! | [`nvml`], [`inventory`] | the GPUs that NVML and the kernel module report |
//! | [`mps`] | the daemons through which containers share a GPU |
//! | [`programs`] | the names of NVIDIA's programs |
//! | [`prepare`] | loads the modules and creates the device nodes |
//! | [`host`] | finds the driver and gathers facts |
//! | [`edits`] | what a container gets |
//! | [`cdi`] | edits as a CDI spec |
//! | [`request`] | the rules for requests of containers: variables, mounts, device nodes |

#![cfg_attr(
    test,
    allow(
        clippy::disallowed_methods,
        reason = "tests open files that they created"
    )
)]

pub mod bus_id;
pub mod capability;
pub mod cdi;
pub mod config;
pub mod decimal;
pub mod device_id;
pub mod driver;
pub mod edits;
pub mod feature;
mod glob;
pub mod host;
pub mod inventory;
pub mod limit_entry;
pub mod mps;
pub mod nvml;
pub mod prepare;
pub mod programs;
mod quotes;
pub mod request;
pub mod require;
mod stored;
pub mod timeouts;

/// A daemon shares these types between threads.
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
