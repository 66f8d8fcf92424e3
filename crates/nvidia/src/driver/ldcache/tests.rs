use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

fn entry<'a>(name: &'a str, path: &'a str, arch: Arch) -> Entry<'a> {
    Entry {
        flags: arch.flags(),
        name: OsStr::new(name),
        path: Path::new(path),
        os_version: 0,
        hwcap: 0,
    }
}

fn new_entry<'a>(name: &'a str, path: &'a str, arch: Arch) -> NewEntry<'a> {
    NewEntry {
        name: OsStr::new(name),
        path: Path::new(path),
        arch,
    }
}

fn cache<'a>(layout: CacheFormat, mut entries: Vec<Entry<'a>>) -> Cache<'a> {
    entries.sort_by(compare);
    Cache {
        entries,
        ..Cache::empty(layout)
    }
}

/// Of everything something, in the new table.
fn rich(layout: CacheFormat) -> Cache<'static> {
    let v3 = Entry {
        hwcap: 1 << 62 | 4 << 32,
        ..entry("liba.so.1", "/v3/liba.so.1", Arch::X86_64)
    };
    let v4 = Entry {
        hwcap: 1 << 62 | 1,
        ..entry("liba.so.1", "/v4/liba.so.1", Arch::X86_64)
    };
    let tls = Entry {
        hwcap: 1 << 63,
        ..entry("libb.so.2", "/tls/libb.so.2", Arch::X86_64)
    };
    let entries = vec![
        v3,
        v4,
        tls,
        entry("liba.so.1", "/lib/liba.so.1", Arch::X86_64),
        entry("liba.so.1", "/lib32/liba.so.1", Arch::I386),
        Entry {
            os_version: 0x0002_0620,
            ..entry("libb.so.2", "/lib/other-name", Arch::X86_64)
        },
    ];
    Cache {
        hwcaps: vec![OsStr::new("x86-64-v3"), OsStr::new("x86-64-v4")],
        generator: Some(b"ldconfig of a test"),
        ..cache(layout, entries)
    }
}

fn paths<'a>(cache: &'a Cache<'_>) -> Vec<&'a str> {
    cache
        .entries()
        .iter()
        .filter_map(|entry| entry.path.to_str())
        .collect()
}

fn error(bytes: &[u8]) -> String {
    format!("{:#}", parse(bytes).unwrap_err())
}

/// `bytes` with a number written over.
fn with_u32(mut bytes: Vec<u8>, at: usize, number: u32) -> Vec<u8> {
    bytes[at..at + 4].copy_from_slice(&number.to_ne_bytes());
    bytes
}

#[test]
fn names_compare_as_in_the_loader() {
    use Ordering::{Equal, Greater, Less};
    for (a, b, order) in [
        ("libc.so.6", "libc.so.6", Equal),
        ("libc.so.6", "libc.so.10", Less),
        ("libc.so.1.9", "libc.so.1.10", Less),
        ("libc.so", "libc.so.6", Less),
        ("liba.so.2", "libb.so.1", Less),
        ("lib1", "liba", Greater), // a number is after any letter
        ("lib1", "lib", Greater),
        ("libc.so.06", "libc.so.6", Equal),
        ("lib1a", "lib01b", Less),
        ("", "", Equal),
        ("", "0", Less),
        ("lib4294967297", "lib1", Equal), // modulo 2^32
    ] {
        assert_eq!(
            compare_names(OsStr::new(a), OsStr::new(b)),
            order,
            "{a} {b}"
        );
        assert_eq!(
            compare_names(OsStr::new(b), OsStr::new(a)),
            order.reverse(),
            "{b} {a}"
        );
    }
}

#[test]
fn entries_are_in_ldconfigs_order() {
    assert_eq!(
        paths(&rich(CacheFormat::New)),
        [
            "/tls/libb.so.2",
            "/lib/other-name",
            "/v3/liba.so.1",
            "/v4/liba.so.1",
            "/lib/liba.so.1",
            "/lib32/liba.so.1"
        ]
    );
}

#[test]
fn hwcaps_index_is_told_from_cpu_features() {
    for (hwcap, index) in [
        (0, None),
        (1 << 62, Some(0)),
        (1 << 62 | 7, Some(7)),
        (1 << 62 | 0x3ff << 32 | 2, Some(2)),
        (1 << 62 | 1 << 42, None),
        (1 << 63 | 1 << 62, None),
        (1 << 61, None),
    ] {
        assert_eq!(
            Entry {
                hwcap,
                ..entry("a", "/a", Arch::I386)
            }
            .hwcaps_index(),
            index,
            "{hwcap:#x}"
        );
    }
}

#[test]
fn reads_what_it_wrote() {
    for layout in [CacheFormat::New, CacheFormat::Compat] {
        let rich = rich(layout);
        assert_eq!(parse(&rich.to_bytes().unwrap()).unwrap(), rich);
    }
    for layout in [CacheFormat::New, CacheFormat::Compat, CacheFormat::Old] {
        let empty = Cache::empty(layout);
        assert_eq!(parse(&empty.to_bytes().unwrap()).unwrap(), empty);
    }
    let old = cache(
        CacheFormat::Old,
        vec![entry("libz.so.1", "/lib/libz.so.1", Arch::X86_64)],
    );
    assert_eq!(parse(&old.to_bytes().unwrap()).unwrap(), old);
}

#[test]
fn a_name_like_the_magic_is_no_new_table() {
    // With one entry, the new table would begin 4 bytes behind the old one; with two, right behind it.
    let one = vec![entry(
        "libglibc-ld.so.cache1.1",
        "/libglibc-ld.so.cache1.1",
        Arch::X86_64,
    )];
    let two = vec![
        entry("z", "glibc-ld.so.cache1.1", Arch::X86_64),
        entry("a", "/a", Arch::X86_64),
    ];
    for entries in [one, two] {
        let old = cache(CacheFormat::Old, entries);
        assert_eq!(parse(&old.to_bytes().unwrap()).unwrap(), old);
    }
}

#[test]
fn the_old_table_of_compat_is_a_cache_of_its_own() {
    let bytes = rich(CacheFormat::Compat).to_bytes().unwrap();
    // A loader that does not know the new magic sees only this.
    let count = u32::from_ne_bytes(bytes[OLD_COUNT_AT..OLD_HEADER].try_into().unwrap());
    assert_eq!(count, 4, "three plain libraries, one of them twice");
    let new = OLD_HEADER + 4 * OLD_ENTRY;
    let mut hidden = bytes;
    hidden[new] = b'X';
    let old = parse(&hidden).unwrap();
    assert_eq!(old.layout(), CacheFormat::Old);
    assert_eq!(
        paths(&old),
        [
            "/lib/other-name",
            "/lib/liba.so.1",
            "/lib32/liba.so.1",
            "/lib32/liba.so.1"
        ]
    );
}

#[test]
fn ours_take_the_place_of_the_images() {
    for layout in [CacheFormat::New, CacheFormat::Compat] {
        let mut cache = rich(layout);
        cache.merge(&[
            new_entry("libcuda.so.1", "/ours/libcuda.so.1", Arch::X86_64),
            new_entry("liba.so.1", "/ours/liba.so.1", Arch::X86_64),
            new_entry("liba.so.1", "/ours/second", Arch::X86_64),
        ]);
        assert_eq!(
            paths(&cache),
            [
                "/ours/libcuda.so.1",
                "/tls/libb.so.2",
                "/lib/other-name",
                "/ours/liba.so.1",
                "/lib32/liba.so.1"
            ]
        );
        assert_eq!(cache.hwcaps().len(), 2);
        assert_eq!(cache.generator(), Some(&b"ldconfig of a test"[..]));
        let ours = cache.lookup(OsStr::new("liba.so.1"), Arch::X86_64).unwrap();
        assert_eq!(ours.path, Path::new("/ours/liba.so.1"));
    }
}

#[test]
fn ours_take_the_place_of_names_that_the_loader_cannot_tell_apart() {
    let mut cache = cache(
        CacheFormat::New,
        vec![entry("libcuda.so.01", "/theirs", Arch::X86_64)],
    );
    cache.merge(&[new_entry("libcuda.so.1", "/ours", Arch::X86_64)]);
    assert_eq!(paths(&cache), ["/ours"]);
}

#[test]
fn lookup_is_by_architecture_and_prefers_plain_libraries() {
    let rich = rich(CacheFormat::New);
    for (name, arch, path) in [
        ("liba.so.1", Arch::X86_64, Some("/lib/liba.so.1")),
        ("liba.so.1", Arch::I386, Some("/lib32/liba.so.1")),
        ("liba.so.1", Arch::Aarch64, None),
        ("libb.so.2", Arch::X86_64, Some("/lib/other-name")),
        ("libb.so.3", Arch::X86_64, None),
        ("", Arch::X86_64, None),
    ] {
        assert_eq!(
            rich.lookup(OsStr::new(name), arch)
                .and_then(|entry| entry.path.to_str()),
            path,
            "{name} {arch:?}"
        );
    }
    assert_eq!(
        rich.candidates(OsStr::new("liba.so.1"), Arch::X86_64)
            .count(),
        3
    );
}

#[test]
fn a_cache_out_of_order_is_put_in_order() {
    let mut mixed = cache(
        CacheFormat::Old,
        vec![
            entry("liba", "/a", Arch::X86_64),
            entry("libb", "/b", Arch::X86_64),
        ],
    );
    mixed.entries.reverse();
    assert_eq!(
        paths(&parse(&mixed.to_bytes().unwrap()).unwrap()),
        ["/b", "/a"]
    );
}

#[test]
fn truncations_are_errors_or_shorter_caches() {
    for layout in [CacheFormat::New, CacheFormat::Compat] {
        let bytes = rich(layout).to_bytes().unwrap();
        for len in 0..bytes.len() {
            match parse(&bytes[..len]) {
                Err(_) => {}
                // Without its new part, a compat cache is an old one, if only its strings were there.
                Ok(cache) => assert!(
                    layout == CacheFormat::Compat && cache.layout() == CacheFormat::Old,
                    "{len} bytes"
                ),
            }
        }
    }
}

#[test]
fn malformed_caches_are_refused() {
    let old = || {
        cache(CacheFormat::Old, vec![entry("liba", "/a", Arch::X86_64)])
            .to_bytes()
            .unwrap()
    };
    let new = || {
        cache(CacheFormat::New, vec![entry("liba", "/a", Arch::X86_64)])
            .to_bytes()
            .unwrap()
    };
    let full = || rich(CacheFormat::New).to_bytes().unwrap();
    let extension =
        u32::from_ne_bytes(full()[NEW_EXTENSION_AT..][..4].try_into().unwrap()) as usize;
    let section = |index: usize| extension + EXTENSION_HEADER + index * EXTENSION_SECTION;

    let mut no_end = new();
    assert_eq!(no_end.pop(), Some(0));
    let mut other_order = new();
    other_order[NEW_BYTE_ORDER_AT] ^= 1;
    let mut invalid = new();
    invalid[NEW_BYTE_ORDER_AT] = 1;
    let mut unrecorded_but_odd = new();
    unrecorded_but_odd[NEW_BYTE_ORDER_AT] = 4;

    for (bytes, shown) in [
        (b"".to_vec(), "not a linker cache: unknown magic"),
        (b"\x7fELF".to_vec(), "not a linker cache: unknown magic"),
        (
            b"glibc-ld.so.cache1.2".to_vec(),
            "not a linker cache: unknown magic",
        ),
        (NEW_MAGIC.to_vec(), "truncated header"),
        (OLD_MAGIC.to_vec(), "truncated header"),
        (
            with_u32(old(), OLD_COUNT_AT, 1_u32.swap_bytes()),
            "byte order is not this machine's",
        ),
        (
            with_u32(new(), NEW_COUNT_AT, 1_u32.swap_bytes()),
            "byte order is not this machine's",
        ),
        (
            with_u32(old(), OLD_COUNT_AT, u32::MAX),
            "4294967295 entries do not fit into 36 bytes",
        ),
        (
            with_u32(new(), NEW_COUNT_AT, 77),
            "77 entries do not fit into 80 bytes",
        ),
        (other_order, "byte order mark 0x3 is not this machine's 0x2"),
        (invalid, "byte order mark 0x1 is not this machine's 0x2"),
        (
            unrecorded_but_odd,
            "byte order mark 0x4 is not this machine's 0x2",
        ),
        (
            with_u32(old(), OLD_HEADER + 4, 8),
            "entry 0: string offset 0x8 is outside the file",
        ),
        (
            with_u32(old(), OLD_HEADER + 8, u32::MAX),
            "entry 0: string offset 0xffffffff is outside the file",
        ),
        (
            with_u32(new(), NEW_HEADER + 4, 80),
            "entry 0: string offset 0x50 is outside the file",
        ),
        (
            no_end,
            "entry 0: string at 0x4b has no end within 4096 bytes",
        ),
        (
            with_u32(new(), NEW_EXTENSION_AT, 3),
            "extension: offset 0x3 is not a multiple of 4",
        ),
        (
            with_u32(new(), NEW_EXTENSION_AT, 0xffff_fffc),
            "extension: offset 0xfffffffc is outside the file",
        ),
        (
            with_u32(new(), NEW_EXTENSION_AT, 4),
            "extension: unknown magic",
        ),
        (
            with_u32(full(), extension + 4, u32::MAX),
            "extension: 4294967295 sections do not fit into the file",
        ),
        (
            with_u32(full(), section(0) + 8, u32::MAX),
            "extension: section 0 of 18 bytes at 0xffffffff is outside the file",
        ),
        (
            with_u32(full(), section(1) + 12, u32::MAX),
            "extension: section 1 of 4294967295 bytes at 0x164 is outside the file",
        ),
        (
            with_u32(full(), section(2), u32::MAX),
            "extension: hwcaps: string offset 0xffffffff is outside the file",
        ),
    ] {
        if cfg!(target_endian = "little") {
            assert_eq!(error(&bytes), shown);
        } else {
            assert!(parse(&bytes).is_err(), "{shown}");
        }
    }
}

#[test]
fn extensions_that_glibc_ignores_are_ignored() {
    let bytes = rich(CacheFormat::New).to_bytes().unwrap();
    let extension = u32::from_ne_bytes(bytes[NEW_EXTENSION_AT..][..4].try_into().unwrap()) as usize;
    let tag = extension + EXTENSION_HEADER;
    let unknown = with_u32(bytes.clone(), tag, 99);
    assert_eq!(parse(&unknown).unwrap().generator(), None);
    let odd = with_u32(bytes.clone(), tag + EXTENSION_SECTION + 12, 7);
    assert!(parse(&odd).unwrap().hwcaps().is_empty());
    // glibc before 2.33 records no byte order
    let mut unmarked = bytes;
    unmarked[NEW_BYTE_ORDER_AT] = 0;
    assert_eq!(parse(&unmarked).unwrap(), rich(CacheFormat::New));
}

#[test]
fn limits_hold_in_both_directions() {
    let long = "x".repeat(MAX_STRING);
    let shown = |cache: &Cache<'_>| format!("{:#}", cache.to_bytes().unwrap_err());
    assert_eq!(
        shown(&cache(
            CacheFormat::New,
            vec![entry(&long, "/a", Arch::I386)]
        )),
        "a string of 4096 bytes, more than 4095"
    );
    assert_eq!(
        shown(&cache(
            CacheFormat::New,
            vec![entry("a\0b", "/a", Arch::I386)]
        )),
        "\"a\\0b\" has a NUL byte"
    );
    assert_eq!(
        shown(&cache(
            CacheFormat::Old,
            vec![entry("a", "/a", Arch::I386); MAX_ENTRIES + 1]
        )),
        "131073 entries, more than 131072"
    );

    // Many entries on one long string: a small file that would be a lot of work.
    let longest = &long[1..];
    let many = MAX_TEXT / (2 * longest.len()) + 1;
    let crowd = cache(
        CacheFormat::New,
        vec![entry(longest, longest, Arch::I386); many],
    );
    assert_eq!(
        shown(&crowd),
        format!(
            "{} bytes of strings, more than {MAX_TEXT}",
            many * 2 * longest.len()
        )
    );
    let mut bytes = cache(CacheFormat::Old, vec![entry(longest, longest, Arch::I386)])
        .to_bytes()
        .unwrap();
    let fields = bytes[OLD_HEADER..OLD_HEADER + OLD_ENTRY].to_vec();
    let fields: Vec<u8> = fields.repeat(many);
    bytes.splice(OLD_HEADER..OLD_HEADER + OLD_ENTRY, fields);
    let bytes = with_u32(bytes, OLD_COUNT_AT, u32::try_from(many).unwrap());
    assert!(
        error(&bytes).ends_with("more than 16777216 bytes of strings"),
        "{}",
        error(&bytes)
    );
}

fn arch() -> impl Strategy<Value = Arch> {
    prop_oneof![
        Just(Arch::X86_64),
        Just(Arch::I386),
        Just(Arch::Aarch64),
        Just(Arch::Arm)
    ]
}

fn layout() -> impl Strategy<Value = CacheFormat> {
    prop_oneof![
        Just(CacheFormat::Old),
        Just(CacheFormat::Compat),
        Just(CacheFormat::New)
    ]
}

/// Few enough names to meet often, among them equal ones for the loader and ones of odd bytes.
fn name() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        "lib[ab]\\.so\\.(0?[1-3]|10)".prop_map(String::into_bytes),
        prop::collection::vec(prop_oneof![Just(b'0'), Just(b'9'), 1..=255_u8], 0..14),
    ]
}

/// Name, path, architecture, OS version, hwcap.
type EntryParts = (Vec<u8>, Vec<u8>, Arch, u32, u64);

/// The strings and numbers that a cache is made of, without the borrowing.
#[derive(Clone, Debug)]
struct Parts {
    layout: CacheFormat,
    entries: Vec<EntryParts>,
    hwcaps: Vec<String>,
    generator: Option<Vec<u8>>,
}

impl Parts {
    fn cache(&self) -> Cache<'_> {
        let old = self.layout == CacheFormat::Old;
        let entries = self
            .entries
            .iter()
            .map(|(name, path, arch, os_version, hwcap)| Entry {
                flags: arch.flags(),
                name: OsStr::from_bytes(name),
                path: Path::new(OsStr::from_bytes(path)),
                os_version: if old { 0 } else { *os_version },
                hwcap: if old { 0 } else { *hwcap },
            });
        Cache {
            hwcaps: if old {
                Vec::new()
            } else {
                self.hwcaps.iter().map(OsStr::new).collect()
            },
            generator: self.generator.as_deref().filter(|_| !old),
            ..cache(self.layout, entries.collect())
        }
    }
}

prop_compose! {
    fn parts()(
        layout in layout(),
        entries in prop::collection::vec(
            (name(), prop_oneof![Just(Vec::new()), name(), name().prop_map(|name| [b"/x/", &*name].concat())], arch(),
                prop_oneof![Just(0), any::<u32>()],
                prop_oneof![4 => Just(0), 2 => (0..3_u64).prop_map(|index| 1 << 62 | index), 1 => any::<u64>()]),
            0..12),
        hwcaps in prop::collection::vec("[a-z0-9-]{0,9}", 0..4),
        generator in prop::option::of(prop::collection::vec(any::<u8>(), 0..9)),
    ) -> Parts {
        Parts { layout, entries, hwcaps, generator }
    }
}

fn ours() -> impl Strategy<Value = Vec<(Vec<u8>, String, Arch)>> {
    prop::collection::vec((name(), "/ours/[a-z]{0,3}", arch()), 0..6)
}

fn borrow(ours: &[(Vec<u8>, String, Arch)]) -> Vec<NewEntry<'_>> {
    ours.iter()
        .map(|(name, path, arch)| NewEntry {
            name: OsStr::from_bytes(name),
            path: Path::new(path),
            arch: *arch,
        })
        .collect()
}

proptest! {
    #[test]
    fn never_panics_on_noise(noise in prop::collection::vec(any::<u8>(), 0..300), magic in 0..3) {
        let magic = [b"".as_slice(), OLD_MAGIC, NEW_MAGIC][usize::try_from(magic).unwrap()];
        drop(parse(&[magic, &noise].concat()));
        drop(with_prefix(&[magic, &noise].concat(), "libcuda.so"));
    }

    #[test]
    fn never_panics_on_damage(
        parts in parts(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut bytes = parts.cache().to_bytes().unwrap();
        for (at, byte) in damage {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        for bytes in [&bytes[..], &bytes[..cut.index(bytes.len())]] {
            drop(with_prefix(bytes, "liba.so"));
            if let Ok(cache) = parse(bytes) {
                // What was read can be written, and then means the same.
                let again = cache.to_bytes().unwrap();
                prop_assert_eq!(parse(&again).unwrap(), cache);
            }
        }
    }

    #[test]
    fn read_is_the_inverse_of_write(parts in parts()) {
        let cache = parts.cache();
        let bytes = cache.to_bytes().unwrap();
        prop_assert_eq!(parse(&bytes).unwrap(), cache);
    }

    /// The binary search finds what a search of all entries finds.
    #[test]
    fn entries_are_found_by_their_prefix(parts in parts(), prefix in "(lib[ab]\\.so|li|l|lib[ab]|x)") {
        let cache = parts.cache();
        let bytes = cache.to_bytes().unwrap();
        let found = with_prefix(&bytes, &prefix).unwrap();
        let expected: Vec<_> =
            cache.entries.iter().filter(|entry| entry.name.as_bytes().starts_with(prefix.as_bytes())).copied().collect();
        prop_assert_eq!(found, expected);
    }

    #[test]
    fn names_have_a_total_order(a in name(), b in name(), c in name()) {
        let order = |a: &[u8], b: &[u8]| compare_names(OsStr::from_bytes(a), OsStr::from_bytes(b));
        prop_assert_eq!(order(&a, &b), order(&b, &a).reverse());
        if order(&a, &b).is_le() && order(&b, &c).is_le() {
            prop_assert!(order(&a, &c).is_le());
        }
    }

    #[test]
    fn merging_twice_is_merging_once(parts in parts(), ours in ours()) {
        let mut once = parts.cache();
        once.merge(&borrow(&ours));
        let bytes = once.to_bytes().unwrap();
        let mut twice = parse(&bytes).unwrap();
        twice.merge(&borrow(&ours));
        prop_assert_eq!(&twice, &once);
        prop_assert_eq!(twice.to_bytes().unwrap(), bytes);
    }

    #[test]
    fn damage_is_no_panic(parts in parts(), ours in ours(), damage in prop::collection::vec((any::<u16>(), any::<u8>()), 1..4)) {
        let mut bytes = Cache { layout: CacheFormat::New, ..parts.cache() }.to_bytes().unwrap();
        for (at, byte) in damage {
            let at = usize::from(at) % bytes.len();
            bytes[at] = byte;
        }
        if let Ok(Some(new)) = update(&bytes, &borrow(&ours), &BTreeSet::new()) {
            for new_entry in borrow(&ours) {
                // What stands in order is found.
                if let Ok(cache) = parse(&new) {
                    prop_assert!(cache.lookup(new_entry.name, new_entry.arch).is_some());
                }
            }
        }
    }

    /// Copying the rows of the image has the result of parsing and writing them.
    #[test]
    fn splicing_is_merging(parts in parts(), ours in ours()) {
        let cache = Cache { layout: CacheFormat::New, ..parts.cache() };
        let bytes = cache.to_bytes().unwrap();
        let ours = borrow(&ours);
        let mut expected = cache.clone();
        expected.merge(&ours);
        match splice(&bytes, &sorted(&ours)).unwrap() {
            Spliced::New(new) => {
                prop_assert_eq!(parse(&new).unwrap(), expected);
                prop_assert_eq!(splice(&new, &sorted(&ours)).unwrap(), Spliced::Unchanged);
            }
            Spliced::Unchanged => prop_assert_eq!(expected, cache),
            Spliced::Unusual => prop_assert!(cache.entries.is_empty() && cache.hwcaps.is_empty(), "{:?}", cache),
        }
    }

    #[test]
    fn after_a_merge_ours_are_found_and_the_rest_is_kept(parts in parts(), ours in ours()) {
        let before = parts.cache();
        let ours = borrow(&ours);
        let mut after = before.clone();
        after.merge(&ours);
        prop_assert!(after.entries.is_sorted_by(|a, b| compare(a, b).is_le()));
        let same = |entry: &Entry<'_>, new: &NewEntry<'_>| {
            entry.is_for(new.arch) && compare_names(entry.name, new.name).is_eq()
        };
        for new in &ours {
            let found: Vec<_> = after.candidates(new.name, new.arch).collect();
            prop_assert_eq!(found.len(), 1);
            let first = ours.iter().find(|first| same(found[0], first)).unwrap();
            prop_assert_eq!(found[0].path, first.path);
            prop_assert_eq!(after.lookup(new.name, new.arch), Some(found[0]));
        }
        let kept = |cache: &Cache<'_>| -> Vec<String> {
            cache
                .entries
                .iter()
                .filter(|entry| !ours.iter().any(|new| same(entry, new)))
                .map(|entry| format!("{entry:?}"))
                .collect()
        };
        prop_assert_eq!(kept(&after), kept(&before));
    }
}
