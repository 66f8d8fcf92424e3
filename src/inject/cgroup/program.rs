//! Device rules → eBPF, in front of a program that a runtime wrote. Pure.
//!
//! The kernel calls the program with `struct bpf_cgroup_dev_ctx { u32 access_type, major, minor }` in register 1, where
//! access_type is the access in the high and the type in the low 16 bits; 1 in register 0 allows.

use super::DeviceRule;
use crate::sys::bpf::Insn;

// linux/bpf_common.h and linux/bpf.h
const LDX_W: u8 = 0x61;
const AND64_IMM: u8 = 0x57;
const RSH64_IMM: u8 = 0x77;
const MOV64_REG: u8 = 0xbf;
const MOV64_IMM: u8 = 0xb7;
const JNE_IMM: u8 = 0x55;
const JSET_IMM: u8 = 0x45;
const EXIT: u8 = 0x95;

const TYPE_CHAR: i32 = 2;
const ACCESS_MKNOD: i32 = 1;

const fn insn(code: u8, dst: u8, src: u8, offset: i16, immediate: i32) -> Insn {
    Insn { code, registers: dst | src << 4, offset, immediate }
}

/// Jumps over all of them reach 32767 instructions.
const MAX_RULES: usize = 4096;

/// Instructions that allow reading and writing the devices of `rules`, and otherwise fall through with register 1
/// as it was, which is all that a program finds at its start.
#[must_use]
pub(super) fn allow(rules: &[DeviceRule]) -> Vec<Insn> {
    const HEAD: usize = 8;
    const EACH: usize = 4;
    let rules = rules.get(..MAX_RULES).unwrap_or(rules);
    let all = i16::try_from(EACH * rules.len()).unwrap_or(i16::MAX);
    let mut program = Vec::with_capacity(HEAD + EACH * rules.len());
    program.extend([
        insn(LDX_W, 2, 1, 0, 0),                 // r2 = access_type
        insn(LDX_W, 4, 1, 4, 0),                 // r4 = major
        insn(LDX_W, 5, 1, 8, 0),                 // r5 = minor
        insn(MOV64_REG, 3, 2, 0, 0),             // r3 = r2
        insn(AND64_IMM, 3, 0, 0, 0xffff),        // r3 is the type
        insn(JNE_IMM, 3, 0, all + 2, TYPE_CHAR), // another type: not ours
        insn(RSH64_IMM, 2, 0, 0, 16),            // r2 is the access
        insn(JSET_IMM, 2, 0, all, ACCESS_MKNOD), // making nodes: not ours
    ]);
    for rule in rules {
        program.extend([
            insn(JNE_IMM, 4, 0, 3, rule.major.cast_signed()),
            insn(JNE_IMM, 5, 0, 2, rule.minor.cast_signed()),
            insn(MOV64_IMM, 0, 0, 0, 1),
            insn(EXIT, 0, 0, 0, 0),
        ]);
    }
    program
}

/// The program that allows what `old` allows, and the devices of `rules`; `None` if `old` begins with them already.
#[must_use]
pub(super) fn extend(old: &[Insn], rules: &[DeviceRule]) -> Option<Vec<Insn>> {
    let mut program = allow(rules);
    if old.starts_with(&program) {
        return None;
    }
    program.extend_from_slice(old);
    Some(program)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MOV32_IMM: u8 = 0xb4;
    const JA: u8 = 0x05;

    /// What the kernel's interpreter does with the instructions that occur here.
    fn run(program: &[Insn], access: u32, kind: u32, major: u32, minor: u32) -> bool {
        let context = [access << 16 | kind, major, minor];
        let mut r = [0u64; 11];
        let mut at = 0usize;
        for _ in 0..program.len() + 1 {
            let Insn { code, registers, offset, immediate } = program[at];
            let (dst, src) = (usize::from(registers & 15), usize::from(registers >> 4));
            let wide = i64::from(immediate).cast_unsigned();
            at += 1;
            let jump = match code {
                LDX_W => {
                    assert_eq!(src, 1, "only the context is read");
                    r[dst] = u64::from(context[usize::try_from(offset).unwrap() / 4]);
                    false
                }
                AND64_IMM => {
                    r[dst] &= wide;
                    false
                }
                RSH64_IMM => {
                    r[dst] >>= immediate;
                    false
                }
                MOV64_REG => {
                    r[dst] = r[src];
                    false
                }
                MOV64_IMM | MOV32_IMM => {
                    r[dst] = wide;
                    false
                }
                JNE_IMM => r[dst] != wide,
                JSET_IMM => r[dst] & wide != 0,
                JA => true,
                EXIT => return r[0] != 0,
                other => panic!("instruction {other:#x}"),
            };
            if jump {
                at = at.checked_add_signed(isize::from(offset)).unwrap();
            }
        }
        panic!("it does not end")
    }

    /// In the manner of runc: type, access, major and minor into r2 to r5, a block per rule, then deny.
    fn runtime_program(rules: &[(u32, u32)], otherwise: i32) -> Vec<Insn> {
        let mut program = vec![
            insn(LDX_W, 2, 1, 0, 0),
            insn(AND64_IMM, 2, 0, 0, 0xffff),
            insn(LDX_W, 3, 1, 0, 0),
            insn(RSH64_IMM, 3, 0, 0, 16),
            insn(LDX_W, 4, 1, 4, 0),
            insn(LDX_W, 5, 1, 8, 0),
        ];
        for (major, minor) in rules {
            program.extend([
                insn(JNE_IMM, 2, 0, 4, TYPE_CHAR),
                insn(JNE_IMM, 4, 0, 3, major.cast_signed()),
                insn(JNE_IMM, 5, 0, 2, minor.cast_signed()),
                insn(MOV32_IMM, 0, 0, 0, 1),
                insn(EXIT, 0, 0, 0, 0),
            ]);
        }
        program.extend([insn(MOV32_IMM, 0, 0, 0, otherwise), insn(EXIT, 0, 0, 0, 0)]);
        program
    }

    fn rules(numbers: &[(u32, u32)]) -> Vec<DeviceRule> {
        numbers.iter().map(|&(major, minor)| DeviceRule { major, minor }).collect()
    }

    proptest! {
        /// The new program allows what the old one allowed and what the rules say, and nothing else.
        #[test]
        fn old_or_ours(
            ours in prop::collection::vec((190u32..200, 0u32..8), 0..6),
            theirs in prop::collection::vec((190u32..200, 0u32..8), 0..6),
            otherwise in 0i32..2,
            access in 1u32..8,
            kind in 1u32..3,
            major in 189u32..201,
            minor in 0u32..9,
        ) {
            let old = runtime_program(&theirs, otherwise);
            let asked = |program: &[Insn]| run(program, access, kind, major, minor);
            let rule_says = kind == 2 && access & 1 == 0 && ours.contains(&(major, minor));
            match extend(&old, &rules(&ours)) {
                Some(new) => prop_assert_eq!(asked(&new), asked(&old) || rule_says),
                None => prop_assert!(!rule_says || asked(&old)),
            }
        }

        #[test]
        fn twice_is_once(ours in prop::collection::vec((0u32..u32::MAX, 0u32..u32::MAX), 0..40)) {
            let new = extend(&runtime_program(&[], 0), &rules(&ours)).unwrap();
            prop_assert_eq!(extend(&new, &rules(&ours)), None);
        }
    }

    #[test]
    fn making_nodes_stays_with_the_runtime() {
        let new = extend(&runtime_program(&[], 0), &rules(&[(195, 0)])).unwrap();
        for (access, allowed) in [(2, true), (4, true), (6, true), (1, false), (3, false), (7, false)] {
            assert_eq!(run(&new, access, 2, 195, 0), allowed, "{access}");
        }
        assert!(!run(&new, 2, 1, 195, 0), "a block device of that number");
    }
}
