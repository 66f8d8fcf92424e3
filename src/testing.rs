//! Re-exports internals for the integration tests, the benchmarks and the fuzz targets. This is not a stable API, and the
//! program does not use it. Each module has the name of the module that it re-exports from.

pub mod cgroup {
    pub use crate::cgroup::{
        DeviceAccess, DeviceCgroup, Grant, Member, allow, extend, hierarchies, locate,
    };
}
pub mod cli {
    pub use crate::cli::{args, cdi_check, doctor_text, parse, stage, status};
    pub mod terminal {
        pub use command_line::terminal::Terminal;
    }
    pub mod why {
        pub use crate::cli::why::to_text;
    }
    pub mod nvidia {
        pub use crate::cli::nvidia::{cli, hook};
    }
}
pub mod doctor {
    pub use crate::doctor::{Caller, Check, Section, Status, examine, inspect, names};
}
pub mod oci {
    pub use crate::oci::SpecView;
    pub mod device_rules {
        pub use crate::oci::device_rules::{DeviceRule, already_allowed};
    }
    pub mod gpu_nodes {
        pub use crate::oci::gpu_nodes::characters;
    }
    pub mod spec_view {
        pub use crate::oci::spec_view::parse;
    }
    pub mod state {
        pub use crate::oci::state::parse;
    }
}
pub mod plan {
    pub mod additions {
        pub use crate::plan::additions::{Additions, OciFacts};
    }
    pub mod request {
        pub use crate::plan::request::{Decision, GpuRequest, Hint, from_spec, hint};
    }
}
pub mod record {
    pub use records::{Outcome, Pod, Record};
    pub mod journal {
        pub use crate::record::journal::encode;
    }
}
