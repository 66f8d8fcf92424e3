//! Images that attack the host: one test for each published vulnerability of NVIDIA's stack, and the races.
//!
//! Each test has two halves. First, a naive program that works like the vulnerable code processes the image in a separate mount
//! namespace, and must be vulnerable: the exploit is real. Then the hook gets the same image.

pub mod blocking;
mod engine;
mod environment;
mod host_sources;
mod inherited;
mod ldconfig;
mod nvml;
mod paths;
mod races;
mod scene;
mod volumes;

use crate::Test;
use crate::engine::Cgroup;
use crate::support::Need;

const NEEDS: &[Need] =
    &[Need::Root, Need::Program("cc"), Need::Program("unshare"), Need::Program("nsenter"), Need::Program("timeout")];
const NEEDS_SETPRIV: &[Need] =
    &[Need::Root, Need::Program("cc"), Need::Program("unshare"), Need::Program("nsenter"), Need::Program("setpriv")];
const NEEDS_READELF: &[Need] =
    &[Need::Root, Need::Program("cc"), Need::Program("unshare"), Need::Program("nsenter"), Need::Program("readelf")];
const NEEDS_PODMAN: &[Need] = &[Need::Root, Need::Program("podman"), Need::Program("runc"), Need::Program("cc")];

const NEEDS_PODMAN_CRUN: &[Need] = &[
    Need::Root,
    Need::Program("podman"),
    Need::Program("runc"),
    Need::Program("crun"),
    Need::Program("cc"),
    Need::CgroupV2,
];
const NEEDS_STATIC: &[Need] =
    &[Need::Root, Need::Program("podman"), Need::Program("runc"), Need::Program("cc"), Need::Cargo, Need::StaticLibc];
const NEEDS_STATIC_CRUN: &[Need] =
    &[Need::Root, Need::Program("podman"), Need::Program("crun"), Need::Program("cc"), Need::Cargo, Need::StaticLibc];
const NEEDS_STATIC_STRACE: &[Need] = &[
    Need::Root,
    Need::Program("strace"),
    Need::Program("unshare"),
    Need::Program("nsenter"),
    Need::Program("cc"),
    Need::Cargo,
    Need::StaticLibc,
];
const NEEDS_FUSE: &[Need] =
    &[Need::Root, Need::Program("cc"), Need::Program("unshare"), Need::Program("nsenter"), Need::Device("/dev/fuse")];

pub const TESTS: &[Test] = &[
    ("hostile::cve_2021_1056_other_gpus_by_mknod", NEEDS_PODMAN, engine::cve_2021_1056_nodes),
    ("hostile::cve_2021_1056_params_that_the_container_rewrites", NEEDS_SETPRIV, engine::cve_2021_1056_params),
    ("hostile::cve_2024_0132_the_hosts_root_as_a_library", NEEDS, paths::cve_2024_0132),
    ("hostile::cve_2024_0133_files_made_through_links", NEEDS, paths::cve_2024_0133),
    ("hostile::cve_2024_0134_links_made_through_links", NEEDS, paths::cve_2024_0134),
    ("hostile::cve_2024_0135_a_host_program_overwritten", NEEDS, ldconfig::cve_2024_0135),
    ("hostile::cve_2024_0136_devices_for_the_images_ldconfig", NEEDS, ldconfig::cve_2024_0136),
    ("hostile::cve_2024_0137_the_hosts_network_for_the_images_ldconfig", NEEDS, ldconfig::cve_2024_0137),
    ("hostile::cve_2025_23266_a_library_preloaded_into_the_hook", NEEDS_PODMAN, environment::entries_of_hook_files),
    ("hostile::cve_2025_23266_specs_of_old_toolkits_with_runc", NEEDS_STATIC, || {
        environment::specs_of_old_toolkits(Cgroup::AsMounted);
    }),
    ("hostile::cve_2025_23266_specs_of_old_toolkits_with_crun", NEEDS_STATIC_CRUN, || {
        environment::specs_of_old_toolkits(Cgroup::WithCrun);
    }),
    ("hostile::cve_2025_23266_nvidias_other_names", NEEDS_STATIC, environment::nvidias_other_names),
    ("hostile::cve_2025_23266_the_static_program", NEEDS_STATIC_STRACE, environment::the_static_program),
    ("hostile::cve_2025_23266_environment_of_each_stage_with_runc", NEEDS_PODMAN, || {
        environment::environment_of_each_stage("runc", Cgroup::AsMounted);
    }),
    ("hostile::cve_2025_23266_environment_of_each_stage_with_crun", NEEDS_PODMAN_CRUN, || {
        environment::environment_of_each_stage("crun", Cgroup::WithCrun);
    }),
    ("hostile::cve_2025_23267_ldconfig_writes_through_links", NEEDS, ldconfig::cve_2025_23267),
    ("hostile::cve_2025_23267_ldconfigs_configuration", NEEDS, ldconfig::cve_2025_23267_configuration),
    ("hostile::cve_2025_23267_files_without_an_end", NEEDS, ldconfig::cve_2025_23267_without_an_end),
    ("hostile::cve_2025_23267_elf_headers_that_lie", NEEDS_READELF, ldconfig::cve_2025_23267_elf_headers),
    ("hostile::devices_of_the_image_are_not_opened", NEEDS, ldconfig::devices_are_not_opened),
    ("hostile::sources_that_users_of_the_host_choose", NEEDS, host_sources::sources_that_users_choose),
    ("hostile::an_mps_directory_that_is_named", NEEDS, host_sources::an_mps_directory_that_is_named),
    ("hostile::a_mount_of_a_users", NEEDS, host_sources::a_mount_of_a_users),
    ("hostile::a_daemon_that_swaps_its_socket", NEEDS, host_sources::a_daemon_that_swaps_its_socket),
    (
        "hostile::nodes_and_sockets_stay_as_they_are",
        NEEDS_PODMAN_CRUN,
        host_sources::nodes_and_sockets_stay_as_they_are,
    ),
    ("hostile::a_management_library_that_attacks", NEEDS, nvml::a_library_that_attacks),
    ("hostile::nvml_inherits_no_files", NEEDS, inherited::nvml_inherits_no_files),
    ("hostile::cve_2025_23359_swapped_after_the_check", NEEDS, races::cve_2025_23359),
    ("hostile::cve_2026_24260_swapped_after_resolution", NEEDS, races::cve_2026_24260),
    (
        "hostile::swapping_directories_while_500_injections_run",
        NEEDS,
        races::swapping_directories_while_500_injections_run,
    ),
    ("hostile::volumes_nothing_is_created_on_them", NEEDS, volumes::nothing_is_created_on_volumes),
    ("hostile::volumes_are_left_alone_by_what_fails", NEEDS, volumes::what_fails_leaves_volumes_alone),
    ("hostile::volumes_with_others_inside_are_refused", NEEDS, volumes::volumes_with_others_inside_are_refused),
    ("hostile::volumes_elsewhere_change_nothing", NEEDS, volumes::volumes_elsewhere_change_nothing),
    ("hostile::volumes_keep_their_flags_below_layers", NEEDS, volumes::layers_keep_the_flags_of_volumes),
    ("hostile::volumes_with_shared_propagation_get_no_layers", NEEDS, volumes::layers_do_not_reach_the_host),
    ("hostile::volumes_with_the_hosts_etc", NEEDS_PODMAN_CRUN, volumes::the_hosts_etc_as_a_volume),
    ("hostile::volumes_with_the_hosts_dev", NEEDS_PODMAN_CRUN, volumes::the_hosts_dev_through_links),
    ("hostile::files_of_others_in_a_user_namespace", NEEDS_PODMAN, volumes::files_of_others_in_a_user_namespace),
    ("hostile::no_mount_namespace_is_refused", NEEDS, volumes::no_mount_namespace_is_refused),
    ("hostile::blocking_files_of_the_kernel_are_not_read", NEEDS, blocking::kernel_files),
    ("hostile::blocking_file_systems_end_at_the_deadline", NEEDS_FUSE, blocking::fuse),
];
