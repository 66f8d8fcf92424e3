//! Runs programs like the kernel does, for every access that can make a difference.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

/// The context of a device program.
#[derive(Clone, Copy, Debug)]
struct Ask {
    kind: u32,
    access: u32,
    major: u32,
    minor: u32,
}

/// Interprets the part of eBPF that device programs use; r1 is the context. `None` for anything else.
fn run(program: &[Insn], ask: Ask) -> Option<u64> {
    let context = [ask.access << 16 | ask.kind, ask.major, ask.minor]
        .map(u32::to_le_bytes)
        .concat();
    let mut registers = [None; 12];
    registers[1] = Some(0);
    let mut at = 0_usize;
    loop {
        let insn = *program.get(at)?;
        let (dst, src) = (usize::from(insn.dst()), usize::from(insn.src()));
        let immediate = i64::from(insn.imm).cast_unsigned();
        let operand = if insn.code & 8 == 0 {
            Some(immediate)
        } else {
            registers[src]
        };
        at += 1;
        match (insn.code & 7, insn.code) {
            (_, 0x95) => return registers[0],
            (1, _) => {
                assert_eq!(src, 1, "loads are from the context");
                registers[1]?;
                let width = match insn.code {
                    0x61 => 4,
                    0x69 => 2,
                    0x71 => 1,
                    _ => return None,
                };
                let start = usize::try_from(insn.off).ok()?;
                let mut bytes = [0; 8];
                bytes[..width].copy_from_slice(context.get(start..start + width)?);
                registers[dst] = Some(u64::from_le_bytes(bytes));
            }
            (class @ (4 | 7), _) => {
                let (a, b) = (registers[dst], operand?);
                let wide = match insn.code & 0xf0 {
                    0x40 => a? | b,
                    0x50 => a? & b,
                    0x60 => a? << b,
                    0x70 if class == 4 => (a? & 0xffff_ffff) >> b,
                    0x70 => a? >> b,
                    0xa0 => a? ^ b,
                    0xb0 => b,
                    _ => return None,
                };
                registers[dst] = Some(if class == 4 { wide & 0xffff_ffff } else { wide });
            }
            (5, _) => {
                let taken = match insn.code & 0xf0 {
                    0x00 => true,
                    0x10 => registers[dst]? == operand?,
                    0x40 => registers[dst]? & operand? != 0,
                    0x50 => registers[dst]? != operand?,
                    _ => return None,
                };
                if taken {
                    at = at.checked_add_signed(insn.off.into())?;
                }
            }
            _ => return None,
        }
    }
}

fn insn(code: u8, dst: u8, src: u8, off: i16, imm: i32) -> Insn {
    Insn::new(code, dst, src, off, imm)
}

/// An entry of config.json; `None` means "all".
#[derive(Clone, Copy, Debug)]
struct Entry {
    allow: bool,
    kind: Option<i32>,
    access: i32,
    major: Option<i32>,
    minor: Option<i32>,
}

/// A program of the form that crun 1.8.1 and runc 1.1.5 load: it decodes the context into r2 to r5, and has one block for each
/// entry, the last one first, then the default. `halfword`: systemd loads the type with 16 bits.
fn runtime_program(entries: &[Entry], default: i32, halfword: bool) -> Vec<Insn> {
    let mut program = if halfword {
        vec![insn(0x69, 2, 1, 0, 0), insn(0x61, 3, 1, 0, 0)]
    } else {
        vec![
            insn(0x61, 2, 1, 0, 0),
            insn(0x54, 2, 0, 0, 0xffff),
            insn(0x61, 3, 1, 0, 0),
        ]
    };
    program.extend([
        insn(0x74, 3, 0, 0, 16),
        insn(0x61, 4, 1, 4, 0),
        insn(0x61, 5, 1, 8, 0),
    ]);
    for entry in entries {
        let mut block = Vec::new();
        block.extend(entry.kind.map(|kind| insn(0x55, 2, 0, -1, kind)));
        if entry.access != 7 {
            // overwrites r1, because the context is no longer read
            block.extend([
                insn(0xbc, 1, 3, 0, 0),
                insn(0x54, 1, 0, 0, entry.access),
                insn(0x5d, 1, 3, -1, 0),
            ]);
        }
        block.extend(entry.major.map(|major| insn(0x55, 4, 0, -1, major)));
        block.extend(entry.minor.map(|minor| insn(0x55, 5, 0, -1, minor)));
        block.extend([
            insn(0xb4, 0, 0, 0, i32::from(entry.allow)),
            insn(0x95, 0, 0, 0, 0),
        ]);
        let length = block.len();
        for (at, insn) in block
            .iter_mut()
            .enumerate()
            .filter(|(_, insn)| insn.off == -1)
        {
            insn.off = i16::try_from(length - at - 1).unwrap();
        }
        program.extend(block);
    }
    program.extend([insn(0xb4, 0, 0, 0, default), insn(0x95, 0, 0, 0, 0)]);
    program
}

fn deny_all() -> Vec<Insn> {
    vec![insn(0xb7, 0, 0, 0, 0), insn(0x95, 0, 0, 0, 0)]
}

const MAJORS: [u32; 4] = [1, 195, 236, 511];

fn entry() -> impl Strategy<Value = Entry> {
    let number = |n: i32| proptest::option::of(0..n);
    (
        any::<bool>(),
        proptest::option::of(1..3),
        1..8,
        number(4),
        number(6),
    )
        .prop_map(|(allow, kind, access, major, minor)| {
            let major = major.and_then(|i| i32::try_from(MAJORS[usize::try_from(i).unwrap()]).ok());
            Entry {
                allow,
                kind,
                access,
                major,
                minor,
            }
        })
}

fn rule() -> impl Strategy<Value = DeviceRule> {
    (0..MAJORS.len(), 0..6_u32).prop_map(|(i, minor)| DeviceRule {
        major: MAJORS[i],
        minor,
    })
}

fn asks() -> impl Iterator<Item = Ask> {
    (0..4).flat_map(move |kind| {
        (0..8).flat_map(move |access| {
            [0, 1, 194, 195, 196, 236, 511]
                .into_iter()
                .flat_map(move |major| {
                    (0..7).chain([0xf_ffff]).map(move |minor| Ask {
                        kind,
                        access,
                        major,
                        minor,
                    })
                })
        })
    })
}

/// Whether the rules grant this access: a character device, with at most read and write access.
fn granted(rules: &[DeviceRule], ask: Ask) -> bool {
    ask.kind == 2
        && ask.access & !6 == 0
        && rules.contains(&DeviceRule {
            major: ask.major,
            minor: ask.minor,
        })
}

fn check(old: &[Insn], rules: &[DeviceRule]) {
    let new = extend(old, rules).unwrap().unwrap();
    for ask in asks() {
        let before = run(old, ask).unwrap() != 0;
        let after = run(&new, ask).unwrap() != 0;
        assert_eq!(after, before || granted(rules, ask), "{ask:?} {rules:?}");
    }
    assert_eq!(extend(&new, rules).unwrap(), None, "extended twice");
    let reversed: Vec<DeviceRule> = rules.iter().rev().copied().collect();
    assert_eq!(
        extend(&new, &reversed).unwrap(),
        None,
        "the order of rules does not count"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn what_was_allowed_stays_and_only_the_rules_are_added(
        entries in vec(entry(), 0..6), default in 0..2, halfword: bool, rules in vec(rule(), 1..8),
    ) {
        check(&runtime_program(&entries, default, halfword), &rules);
    }

    #[test]
    fn from_nothing_only_the_rules(rules in vec(rule(), 1..12)) {
        check(&deny_all(), &rules);
    }

    #[test]
    fn extensions_add_up(first in vec(rule(), 1..4), second in vec(rule(), 1..4)) {
        let once = extend(&deny_all(), &first).unwrap().unwrap();
        prop_assume!(extend(&once, &second).unwrap().is_some());
        check(&once, &second);
    }
}

#[test]
fn one_test_for_each_number() {
    let rules = [(195, 0), (195, 255), (195, 0), (236, 0)]
        .map(|(major, minor)| DeviceRule { major, minor });
    let block = allow_block(&rules).unwrap();
    let compared: Vec<(u8, i32)> = block[5..]
        .iter()
        .filter(|insn| matches!(insn.code, JEQ_K | JNE_K))
        .map(|insn| (insn.dst(), insn.imm))
        .collect();
    assert_eq!(compared, [(4, 195), (5, 0), (5, 255), (4, 236), (5, 0)]);
    assert_eq!(block.len(), 5 + (3 + 2) + (3 + 1));
}

#[test]
fn numbers_the_kernel_cannot_have_are_refused() {
    let text = allow_block(&[DeviceRule {
        major: u32::MAX,
        minor: 0,
    }])
    .unwrap_err()
    .to_string();
    assert_eq!(text, "invalid device number: c 4294967295:0 rw");
    let many: Vec<DeviceRule> = (0..40_000)
        .map(|minor| DeviceRule { major: 1, minor })
        .collect();
    assert_eq!(
        allow_block(&many).unwrap_err().to_string(),
        "too many device rules for one program"
    );
}

/// Blinds the constants of a program like `bpf_jit_harden = 2`, as in dumps of kernel 6.18.
fn blind(plain: &[Insn], mut random: i32) -> Vec<Insn> {
    let width = |insn: &Insn| {
        let constant = matches!(insn.code & 7, 4..=7)
            && insn.code & SOURCE_X == 0
            && !matches!(insn.code, EXIT | 5);
        let zero = matches!(insn.code, MOV64_K | MOV32_K) && insn.imm == 0;
        if constant && !zero { 3 } else { 1 }
    };
    let starts: Vec<usize> = plain
        .iter()
        .scan(0, |next, insn| {
            *next += width(insn);
            Some(*next - width(insn))
        })
        .collect();
    let mut out = Vec::new();
    for (at, insn) in plain.iter().enumerate() {
        let mut insn = *insn;
        if insn.code & 7 == 5 && insn.code != EXIT {
            let target = (at + 1).checked_add_signed(insn.off.into()).unwrap();
            insn.off = i16::try_from(starts[target] - starts[at] - width(&insn)).unwrap();
        }
        if width(&insn) == 3 {
            random = random.wrapping_mul(1_103_515_245).wrapping_add(12_345);
            let wide = if insn.code & 7 == 4 { 0 } else { 3 };
            out.push(Insn::new(
                MOV32_K + wide,
                BPF_REG_AX,
                0,
                0,
                random ^ insn.imm,
            ));
            out.push(Insn::new(XOR32_K + wide, BPF_REG_AX, 0, 0, random));
            out.push(Insn::new(
                insn.code | SOURCE_X,
                insn.dst(),
                BPF_REG_AX,
                insn.off,
                0,
            ));
        } else if matches!(insn.code, MOV64_K | MOV32_K) {
            out.push(Insn::new(XOR64_X, insn.dst(), insn.dst(), 0, 0));
        } else {
            out.push(insn);
        }
    }
    out
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn blinding_is_reverted(
        entries in vec(entry(), 0..6), default in 0..2, rules in vec(rule(), 1..8), random: i32,
    ) {
        let mut plain = runtime_program(&entries, default, false);
        for insn in plain.iter_mut().filter(|insn| insn.code == MOV32_K && insn.imm == 0) {
            // the width of `w0 = 0` is lost
            insn.code = MOV64_K;
        }
        prop_assert_eq!(reloadable(&blind(&plain, random)).unwrap(), plain.clone());
        let longer = extend(&plain, &rules).unwrap().unwrap();
        prop_assert_eq!(extend(&blind(&plain, random), &rules).unwrap(), Some(longer.clone()));
        prop_assert_eq!(extend(&blind(&longer, random), &rules).unwrap(), None);
    }

    #[test]
    fn never_panics(parts in vec((any::<u8>(), 0..12_u8, 0..12_u8, any::<i16>(), any::<i32>()), 0..20)) {
        let dump: Vec<Insn> = parts.into_iter().map(|(code, dst, src, off, imm)| insn(code, dst, src, off, imm)).collect();
        let _ = reloadable(&dump);
    }
}

#[test]
fn an_unknown_blinding_is_refused() {
    let odd = [
        insn(MOV64_K, BPF_REG_AX, 0, 0, 7),
        insn(0xbf, 0, BPF_REG_AX, 0, 0),
        insn(EXIT, 0, 0, 0, 0),
    ];
    assert!(base::report::render(&reloadable(&odd).unwrap_err()).contains("bpf_jit_harden"));
}

#[test]
fn zero_extensions_become_plain_moves() {
    let moves = [insn(MOV32_X, 3, 3, 0, 1), insn(MOV32_X, 3, 2, 0, 0)];
    assert_eq!(
        reloadable(&moves).unwrap(),
        [insn(MOV32_X, 3, 3, 0, 0), insn(MOV32_X, 3, 2, 0, 0)]
    );
}
