//! Decides what a container gets: the names of its devices for the hook or for CDI, and their device nodes.
//!
//! | module | purpose |
//! |---|---|
//! | [`allocator`] | answers the kubelet |
//! | [`response`], [`layout`] | the answer to Allocate |
//! | [`prefer`] | the answer to GetPreferredAllocation |

pub mod allocator;
pub mod layout;
pub mod prefer;
pub mod response;
