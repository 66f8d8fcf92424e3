//! Answers an engine from the state of the node and from config.toml.

use std::path::{Path, PathBuf};

use anyhow::Result;
use base::report::{ErrorReport, Finding};
use nvidia_host::config;
use tokio::sync::watch;

use super::grant::{self, Grant, Known};
use super::record;
use super::session::Plugin;
use crate::cdi_specs::SharedSpecs;
use crate::log::Log;
use crate::model::Refusal;
use crate::node::Offer;
use crate::proto::nri::{
    CdiDevice, Container, ContainerAdjustment, CreateContainerRequest, CreateContainerResponse,
    PodSandbox,
};

/// Answers from the newest offer.
#[derive(Debug)]
pub struct NodePlugin {
    config: Option<PathBuf>,
    offer: watch::Receiver<Offer>,
    /// `None` if the process keeps no CDI specs for engines
    specs: Option<SharedSpecs>,
    log: Log,
}

impl NodePlugin {
    /// Creates a plugin that reads this config.toml.
    #[must_use]
    pub fn new(
        config: Option<&Path>,
        offer: watch::Receiver<Offer>,
        specs: Option<SharedSpecs>,
        log: Log,
    ) -> Self {
        Self {
            config: config.map(Path::to_owned),
            offer,
            specs,
            log,
        }
    }

    /// As for the hook, a change of config.toml is effective for the next container, and an invalid config.toml stops only containers
    /// that request GPUs. A GPU that was denied is granted only when the CDI spec has it.
    fn decide(&self, container: &Container) -> Result<Grant> {
        if !grant::may_ask(container) {
            return Ok(Grant::Nothing);
        }
        let (config, _) = config::read(self.config.as_deref())?;
        let offer = self.offer.borrow();
        let restored = self.specs.as_ref().map(SharedSpecs::restored);
        let known = Known {
            inventory: offer.known.as_deref(),
            limits: &offer.limits,
            in_specs: restored.as_ref().unwrap_or(&offer.in_specs),
            mps: &offer.mps,
        };
        grant::grant(container, &config, known)
    }

    fn log(&self, container: &str, finding: &Finding) {
        self.log.finding(&Finding {
            what: format!("{container}: {}", finding.what),
            ..finding.clone()
        });
    }
}

impl Plugin for NodePlugin {
    fn create_container(
        &self,
        request: &CreateContainerRequest,
    ) -> Result<CreateContainerResponse, Refusal> {
        let Some(container) = &request.container else {
            return Ok(CreateContainerResponse::default());
        };
        let name = full_name(request.pod.as_ref(), container);
        match self.decide(container) {
            Ok(Grant::Nothing) => Ok(CreateContainerResponse::default()),
            Ok(Grant::Unchanged(finding)) => {
                self.log(&name, &finding);
                record::left_unchanged(request.pod.as_ref(), container, &finding);
                Ok(CreateContainerResponse::default())
            }
            Ok(Grant::Devices(names, findings)) => {
                self.log.note(&format!("{name} gets {}", names.join(", ")));
                findings.iter().for_each(|finding| self.log(&name, finding));
                let cdi_devices = names.into_iter().map(|name| CdiDevice { name }).collect();
                Ok(CreateContainerResponse {
                    adjust: Some(ContainerAdjustment { cdi_devices }),
                })
            }
            Err(error) => {
                let ErrorReport { kind, line, hint } = ErrorReport::new(&error);
                record::refusal(request.pod.as_ref(), container, &error);
                self.log
                    .error(&error.context(format!("cannot set up container {name:?}")));
                Err(Refusal::of(
                    kind,
                    &format!("cannot set up container {:?}: {line}", container.name),
                    &hint,
                ))
            }
        }
    }
}

/// `namespace/pod/container`
fn full_name(pod: Option<&PodSandbox>, container: &Container) -> String {
    match pod {
        Some(pod) => format!("{}/{}/{}", pod.namespace, pod.name, container.name),
        None => container.name.clone(),
    }
}
