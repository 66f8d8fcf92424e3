//! stub
use std::{path::Path, time::Duration};
use anyhow::Result;
use crate::{finding::Finding, paths::HostPath, sys::process::Identity};
#[derive(Debug)] pub struct UserSpec;
#[derive(Debug)]
pub struct Config { pub accept_envvar_when_unprivileged: bool, pub supported_driver_capabilities: Vec<String>, pub driver_root: HostPath, pub ldcache: Option<HostPath>, pub edit_cgroups: bool, pub user: Option<UserSpec>, pub debug: Option<HostPath>, pub nvml_timeout: Duration }
pub fn read(_: Option<&Path>, _: Option<&Path>) -> Result<(Config, Vec<Finding>)> { anyhow::bail!("x") }
pub fn resolve(_: &UserSpec) -> Result<Identity> { anyhow::bail!("x") }
