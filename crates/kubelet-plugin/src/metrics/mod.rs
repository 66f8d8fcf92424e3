//! Serves metrics for Prometheus: with the names and labels of GKE's device plugin or of NVIDIA's DCGM exporter, and our own.
//!
//! | module | purpose |
//! |---|---|
//! | [`readings`] | collects what the monitor reports |
//! | [`series`] | decides which series follow, and attributes devices to containers |
//! | [`dcgm`] | the series with the names of NVIDIA's DCGM exporter |
//! | [`text`] | the format |
//! | [`server`] | HTTP |

pub mod dcgm;
pub mod readings;
pub mod series;
pub mod server;
pub mod text;
