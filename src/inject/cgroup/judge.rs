//! What a device program answers. Pure: the program is run here, as the kernel would run it.

use base::sys::bpf::Insn;

use crate::oci::device_rules::DeviceRule;

/// What a program does about some devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It lets all of them be read and written.
    Allows,
    /// It denies at least one of them, as every device that it does not list: runtimes and systemd write such programs, to
    /// which devices are added.
    AllowList,
    /// It allows others and denies one of them, or does more than a runtime's program: somebody wants it so.
    Denies,
}

/// `BPF_DEVCG_ACC_*` in the high half, character device in the low one.
const READ: u32 = 2 << 16 | 2;
const WRITE: u32 = 4 << 16 | 2;
pub(super) const BOTH: u32 = READ | WRITE;

/// Devices that no list has by name: the last numbers of the ranges that the kernel hands out, and of all that there are.
const UNLISTED: [DeviceRule; 3] = [
    DeviceRule { major: 4095, minor: 1_048_575 },
    DeviceRule { major: 3071, minor: 77_777 },
    DeviceRule { major: 253, minor: 1_000_003 },
];

/// As many as the kernel's verifier follows.
const MAX_STEPS: usize = 1_000_000;

/// Judges a program, as its loader wrote it.
pub(super) fn judge(program: &[Insn], rules: &[DeviceRule]) -> Verdict {
    let each: Option<Vec<bool>> = rules.iter().map(|rule| allows(program, rule)).collect();
    let unlisted: Option<Vec<bool>> = UNLISTED.iter().map(|rule| allows(program, rule)).collect();
    match (each, unlisted) {
        (Some(each), _) if each.iter().all(|allowed| *allowed) => Verdict::Allows,
        (Some(_), Some(unlisted)) if !unlisted.contains(&true) => Verdict::AllowList,
        _ => Verdict::Denies,
    }
}

/// Whether a device may be read, written and both; `None` if that is not known.
fn allows(program: &[Insn], rule: &DeviceRule) -> Option<bool> {
    let answers = [READ, WRITE, BOTH].map(|access| run(program, [access, rule.major, rule.minor]));
    answers.into_iter().try_fold(true, |all, answer| Some(all & (answer? & 1 == 1)))
}

#[derive(Clone, Copy)]
enum Value {
    Number(u64),
    /// A pointer into the context, this far from its start
    Context(i64),
}

impl Value {
    const fn number(self) -> Option<u64> {
        match self {
            Self::Number(number) => Some(number),
            Self::Context(_) => None,
        }
    }
}

/// Runs it for a context: access, major, minor. `None`: it uses something that no runtime's program does, such as a helper
/// function, a map or the stack.
pub(super) fn run(program: &[Insn], context: [u32; 3]) -> Option<u64> {
    let bytes = context.map(u32::to_ne_bytes).concat();
    // With the register of constant blinding, which a dump shows.
    let mut registers = [None; 12];
    *registers.get_mut(1)? = Some(Value::Context(0));
    let mut at = 0_usize;
    for _ in 0..MAX_STEPS {
        let insn = *program.get(at)?;
        at += 1;
        let (class, operation) = (insn.code & 7, insn.code & 0xf0);
        let immediate = Value::Number(i64::from(insn.imm).cast_unsigned());
        let operand = if insn.code & 8 == 0 { Some(immediate) } else { register(&registers, insn.src()) };
        match class {
            1 => {
                let Some(Value::Context(offset)) = register(&registers, insn.src()) else { return None };
                let start = usize::try_from(offset.checked_add(i64::from(insn.off))?).ok()?;
                *registers.get_mut(usize::from(insn.dst()))? = Some(Value::Number(load(&bytes, start, insn.code)?));
            }
            4 | 7 => {
                let value = compute(class, operation, register(&registers, insn.dst()), operand?)?;
                *registers.get_mut(usize::from(insn.dst()))? = Some(value);
            }
            5 if operation == 0x90 => return register(&registers, 0)?.number(),
            5 | 6 => {
                let taken = match operation {
                    0 if class == 5 => true,
                    _ => compare(class, operation, register(&registers, insn.dst())?.number()?, operand?.number()?)?,
                };
                if taken {
                    at = at.checked_add_signed(insn.off.into())?;
                }
            }
            _ => return None,
        }
    }
    None
}

fn register(registers: &[Option<Value>], number: u8) -> Option<Value> {
    registers.get(usize::from(number)).copied().flatten()
}

/// `BPF_LDX | BPF_MEM` of 4, 2, 1 and 8 bytes.
fn load(bytes: &[u8], start: usize, code: u8) -> Option<u64> {
    let width = match code {
        0x61 => 4,
        0x69 => 2,
        0x71 => 1,
        0x79 => 8,
        _ => return None,
    };
    let found = bytes.get(start..start.checked_add(width)?)?;
    // The kernel stores the context in the byte order of the machine.
    let mut number = [0; 8];
    let start = if cfg!(target_endian = "little") { 0 } else { 8 - width };
    number.get_mut(start..start + width)?.copy_from_slice(found);
    Some(u64::from_ne_bytes(number))
}

/// Operations of 32 bits take the lower half of a register, and clear the upper half.
const fn narrow(is_wide: bool, number: u64) -> u64 {
    if is_wide { number } else { number & 0xffff_ffff }
}

/// The number as a signed one of 64 or 32 bits.
fn signed(is_wide: bool, number: u64) -> i64 {
    if is_wide { number.cast_signed() } else { i64::from(u32::try_from(number).unwrap_or_default().cast_signed()) }
}

fn compute(class: u8, operation: u8, old: Option<Value>, operand: Value) -> Option<Value> {
    if operation == 0xb0 && class == 7 {
        return Some(operand);
    }
    let is_wide = class == 7;
    let b = operand.number()?;
    let a = if operation == 0xb0 { 0 } else { old?.number()? };
    let (a, b) = (narrow(is_wide, a), narrow(is_wide, b));
    let shift = u32::try_from(b).ok().filter(|shift| *shift < if is_wide { 64 } else { 32 });
    let result = match operation {
        0x00 => a.wrapping_add(b),
        0x10 => a.wrapping_sub(b),
        0x20 => a.wrapping_mul(b),
        0x40 => a | b,
        0x50 => a & b,
        0x60 => a << shift?,
        0x70 => a >> shift?,
        0xa0 => a ^ b,
        0xb0 => b,
        _ => return None,
    };
    Some(Value::Number(narrow(is_wide, result)))
}

fn compare(class: u8, operation: u8, a: u64, b: u64) -> Option<bool> {
    let is_wide = class == 5;
    let (a, b) = (narrow(is_wide, a), narrow(is_wide, b));
    let (signed_a, signed_b) = (signed(is_wide, a), signed(is_wide, b));
    Some(match operation {
        0x10 => a == b,
        0x20 => a > b,
        0x30 => a >= b,
        0x40 => a & b != 0,
        0x50 => a != b,
        0x60 => signed_a > signed_b,
        0x70 => signed_a >= signed_b,
        0xa0 => a < b,
        0xb0 => a <= b,
        0xc0 => signed_a < signed_b,
        0xd0 => signed_a <= signed_b,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::super::program::extend;
    use super::*;

    const GPU: DeviceRule = DeviceRule { major: 195, minor: 0 };
    const OTHER: DeviceRule = DeviceRule { major: 195, minor: 1 };

    fn insn(code: u8, dst: u8, src: u8, off: i16, imm: i32) -> Insn {
        Insn::new(code, dst, src, off, imm)
    }

    fn answer(number: i32) -> Vec<Insn> {
        vec![insn(0xb7, 0, 0, 0, number), insn(0x95, 0, 0, 0, 0)]
    }

    /// `if major == 195: return 0; return 1`, with a copy of the context pointer as compilers make it.
    fn denies_nvidia() -> Vec<Insn> {
        let start = vec![insn(0xbf, 6, 1, 0, 0), insn(0x61, 2, 6, 4, 0), insn(0x55, 2, 0, 2, 195)];
        [start, answer(0), answer(1)].concat()
    }

    #[test]
    fn allow_lists_are_told_from_deny_programs() {
        let extended = extend(&answer(0), &[GPU]).unwrap().unwrap();
        for (what, program, rules, verdict) in [
            ("nothing allowed", answer(0), vec![GPU], Verdict::AllowList),
            ("all allowed", answer(1), vec![GPU, OTHER], Verdict::Allows),
            ("listed", extended.clone(), vec![GPU], Verdict::Allows),
            ("one of two listed", extended, vec![GPU, OTHER], Verdict::AllowList),
            ("singled out", denies_nvidia(), vec![GPU], Verdict::Denies),
            ("others singled out", denies_nvidia(), vec![DeviceRule { major: 511, minor: 0 }], Verdict::Allows),
            ("a helper function", [vec![insn(0x85, 0, 0, 0, 5)], answer(1)].concat(), vec![GPU], Verdict::Denies),
            ("no end", vec![insn(0x05, 0, 0, -1, 0)], vec![GPU], Verdict::Denies),
        ] {
            assert_eq!(judge(&program, &rules), verdict, "{what}");
        }
    }

    #[test]
    fn reading_alone_is_not_enough() {
        // `if access & write: return 0; return 1`
        let start = vec![insn(0x61, 2, 1, 0, 0), insn(0x74, 2, 0, 0, 16), insn(0x45, 2, 0, 2, 4)];
        let read_only = [start, answer(1), answer(0)].concat();
        assert_eq!(judge(&read_only, &[GPU]), Verdict::AllowList);
    }
}
