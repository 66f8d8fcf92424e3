//! Serves metrics for Prometheus: those of GKE's device plugin with their names and labels, and our own.
//!
//! | module | purpose |
//! |---|---|
//! | [`readings`] | collects what the monitor reports |
//! | [`series`] | decides which series follow, and attributes devices to containers |
//! | [`text`] | the format |
//! | [`timed`] | measures answers to the kubelet |
//! | [`server`] | HTTP |

pub mod readings;
pub mod series;
pub mod server;
pub mod text;
pub mod timed;
