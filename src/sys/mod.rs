//! System calls: with [`crate::nvml`], the only home of `unsafe`.
