//! Writes the decisions of the plan to the log and to the container's record.

use anyhow::Result;

use base::report::Finding;
use nvidia_host::config::Config;
use nvidia_host::host::Host;
use nvidia_host::inventory::select::Device;

use super::host::inspect_prepared;
use super::open_log;
use crate::oci::SpecView;
use crate::plan::Observer;
use crate::plan::asked::Asked;
use crate::plan::request::GpuRequest;
use crate::record::Outcome;
use crate::record::call::Call;

impl Observer for Call {
    fn not_asked(&mut self, _: &SpecView) {}

    fn config_read(&mut self, config: &Config) {
        open_log(config, self);
    }

    fn decided(&mut self, asks: bool) {
        if asks {
            self.keep();
        }
    }

    fn finding(&mut self, finding: &Finding) {
        Self::finding(self, finding);
    }

    fn nothing(&mut self, reason: String, _: &SpecView) {
        self.note(&format!("nothing to do: {reason}"));
    }

    fn left_alone(&mut self, finding: Finding) {
        Self::finding(self, &finding);
        self.end(Outcome::LeftAlone, &finding.what);
    }

    fn requested(&mut self, request: &GpuRequest) {
        self.record().asked = Some(Asked::from(request));
        self.record().request = format!("{} asks for {}", request.asked_by, request.devices.names().join(","));
        self.step_done("request");
    }

    fn host(&mut self, request: &GpuRequest, config: &Config) -> Result<Host> {
        let host = inspect_prepared(request, config, self)?;
        self.record().driver.clone_from(&host.inventory.driver_version);
        self.step_done("driver");
        Ok(host)
    }

    fn devices(&mut self, devices: &[Device<'_>]) {
        self.record().devices = devices.iter().map(ToString::to_string).collect();
        self.step_done("files");
    }
}
