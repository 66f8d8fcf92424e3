//! Interprets device programs to determine which devices they allow. Pure.

use base::sys::bpf::Insn;

use crate::oci::device_rules::DeviceRule;

/// The effect of a program on some devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FilterEffect {
    /// It allows read and write access to all of them.
    Allows,
    /// It denies at least one of them, and every device that it does not list. Runtimes and systemd write such programs, and
    /// devices can be added to them.
    AllowList,
    /// It allows unlisted devices and denies one of these, or it is not a program of a runtime: an administrator denies the
    /// devices.
    Denies,
}

/// `BPF_DEVCG_ACC_*` in the high half, character device in the low one.
const READ: u32 = 2 << 16 | 2;
const WRITE: u32 = 4 << 16 | 2;
pub(super) const BOTH: u32 = READ | WRITE;

/// Devices that no list contains: the last numbers of the ranges that the kernel assigns, and of all device numbers.
const UNLISTED: [DeviceRule; 3] = [
    DeviceRule {
        major: 4095,
        minor: 1_048_575,
    },
    DeviceRule {
        major: 3071,
        minor: 77_777,
    },
    DeviceRule {
        major: 253,
        minor: 1_000_003,
    },
];

/// Upper limit for executed instructions, the same as in the kernel's verifier.
const MAX_STEPS: usize = 1_000_000;

/// Determines the verdict of a program on these devices.
pub(super) fn interpret(program: &[Insn], rules: &[DeviceRule]) -> FilterEffect {
    match (Answers::of(program, rules), Answers::of(program, &UNLISTED)) {
        (Some(rules), _) if !rules.denies => FilterEffect::Allows,
        (Some(_), Some(unlisted)) if !unlisted.allows => FilterEffect::AllowList,
        _ => FilterEffect::Denies,
    }
}

/// What a program answers for some devices.
struct Answers {
    /// It allows at least one of them
    allows: bool,
    /// It denies at least one of them
    denies: bool,
}

impl Answers {
    /// Asks the program about each device; `None` if an answer is unknown.
    fn of(program: &[Insn], rules: &[DeviceRule]) -> Option<Self> {
        let (mut allows, mut denies) = (false, false);
        for rule in rules {
            let is_allowed = is_allowed(program, *rule)?;
            allows |= is_allowed;
            denies |= !is_allowed;
        }
        Some(Self { allows, denies })
    }
}

/// Reports whether a program allows a device to be read, written, and both; `None` if that is unknown.
fn is_allowed(program: &[Insn], rule: DeviceRule) -> Option<bool> {
    let mut is_allowed = true;
    for access in [READ, WRITE, BOTH] {
        is_allowed &= run(program, [access, rule.major, rule.minor])? & 1 == 1;
    }
    Some(is_allowed)
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

/// Runs a program for a context of access, major and minor number. `None` if it uses a feature that programs of runtimes do not
/// use, such as a helper function, a map or the stack.
pub(super) fn run(program: &[Insn], context: [u32; 3]) -> Option<u64> {
    let bytes = context.map(u32::to_ne_bytes).concat();
    // Eleven registers, and the scratch register of constant blinding, which occurs in dumps.
    let mut registers = [None; 12];
    *registers.get_mut(1)? = Some(Value::Context(0));
    let mut at = 0_usize;
    for _ in 0..MAX_STEPS {
        let insn = *program.get(at)?;
        at += 1;
        let (class, operation) = (insn.code & 7, insn.code & 0xf0);
        let immediate = Value::Number(i64::from(insn.imm).cast_unsigned());
        let operand = if insn.code & 8 == 0 {
            Some(immediate)
        } else {
            register(&registers, insn.src())
        };
        match class {
            1 => {
                let Some(Value::Context(offset)) = register(&registers, insn.src()) else {
                    return None;
                };
                let start = usize::try_from(offset.checked_add(i64::from(insn.off))?).ok()?;
                *registers.get_mut(usize::from(insn.dst()))? =
                    Some(Value::Number(load(&bytes, start, insn.code)?));
            }
            4 | 7 => {
                let value = compute(class, operation, register(&registers, insn.dst()), operand?)?;
                *registers.get_mut(usize::from(insn.dst()))? = Some(value);
            }
            5 if operation == 0x90 => return register(&registers, 0)?.number(),
            5 | 6 => {
                let taken = match operation {
                    0 if class == 5 => true,
                    _ => compare(
                        class,
                        operation,
                        register(&registers, insn.dst())?.number()?,
                        operand?.number()?,
                    )?,
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

/// Loads 4, 2, 1 or 8 bytes (`BPF_LDX | BPF_MEM`).
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
    let start = if cfg!(target_endian = "little") {
        0
    } else {
        8 - width
    };
    number.get_mut(start..start + width)?.copy_from_slice(found);
    Some(u64::from_ne_bytes(number))
}

/// Clears the upper half of a number for 32-bit operations.
const fn narrow(is_wide: bool, number: u64) -> u64 {
    if is_wide {
        number
    } else {
        number & 0xffff_ffff
    }
}

/// Converts a number to a signed number of 64 or 32 bits.
fn signed(is_wide: bool, number: u64) -> i64 {
    if is_wide {
        number.cast_signed()
    } else {
        i64::from(u32::try_from(number).unwrap_or_default().cast_signed())
    }
}

fn compute(class: u8, operation: u8, old: Option<Value>, operand: Value) -> Option<Value> {
    if operation == 0xb0 && class == 7 {
        return Some(operand);
    }
    let is_wide = class == 7;
    let b = operand.number()?;
    let a = if operation == 0xb0 { 0 } else { old?.number()? };
    let (a, b) = (narrow(is_wide, a), narrow(is_wide, b));
    let width = if is_wide { 64 } else { 32 };
    let shift = u32::try_from(b).ok().filter(|shift| *shift < width);
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

    const GPU: DeviceRule = DeviceRule {
        major: 195,
        minor: 0,
    };
    const OTHER: DeviceRule = DeviceRule {
        major: 195,
        minor: 1,
    };

    fn insn(code: u8, dst: u8, src: u8, off: i16, imm: i32) -> Insn {
        Insn::new(code, dst, src, off, imm)
    }

    fn answer(number: i32) -> Vec<Insn> {
        vec![insn(0xb7, 0, 0, 0, number), insn(0x95, 0, 0, 0, 0)]
    }

    /// `if major == 195: return 0; return 1`, with a copy of the context pointer as compilers make it.
    fn denies_nvidia() -> Vec<Insn> {
        let start = vec![
            insn(0xbf, 6, 1, 0, 0),
            insn(0x61, 2, 6, 4, 0),
            insn(0x55, 2, 0, 2, 195),
        ];
        [start, answer(0), answer(1)].concat()
    }

    #[test]
    fn allow_lists_and_deny_programs_are_distinguished() {
        let extended = extend(&answer(0), &[GPU]).unwrap().unwrap();
        for (what, program, rules, verdict) in [
            (
                "nothing allowed",
                answer(0),
                vec![GPU],
                FilterEffect::AllowList,
            ),
            (
                "all allowed",
                answer(1),
                vec![GPU, OTHER],
                FilterEffect::Allows,
            ),
            ("listed", extended.clone(), vec![GPU], FilterEffect::Allows),
            (
                "one of two listed",
                extended,
                vec![GPU, OTHER],
                FilterEffect::AllowList,
            ),
            (
                "singled out",
                denies_nvidia(),
                vec![GPU],
                FilterEffect::Denies,
            ),
            (
                "others singled out",
                denies_nvidia(),
                vec![DeviceRule {
                    major: 511,
                    minor: 0,
                }],
                FilterEffect::Allows,
            ),
            (
                "a helper function",
                [vec![insn(0x85, 0, 0, 0, 5)], answer(1)].concat(),
                vec![GPU],
                FilterEffect::Denies,
            ),
            (
                "no end",
                vec![insn(0x05, 0, 0, -1, 0)],
                vec![GPU],
                FilterEffect::Denies,
            ),
        ] {
            assert_eq!(interpret(&program, &rules), verdict, "{what}");
        }
    }

    #[test]
    fn comparisons() {
        // Negative as a signed number of 64 or 32 bits
        const MINUS_64: u64 = u64::MAX;
        const MINUS_32: u64 = u32::MAX as u64;
        // For 1 and 2, 2 and 2, 2 and 1, a negative number and 1: `=`, unsigned `>`, signed `>`, and so on
        for (operation, expected) in [
            (0x10, [false, true, false, false]),
            (0x20, [false, false, true, true]),
            (0x30, [false, true, true, true]),
            (0x40, [false, true, false, true]),
            (0x50, [true, false, true, true]),
            (0x60, [false, false, true, false]),
            (0x70, [false, true, true, false]),
            (0xa0, [true, false, false, false]),
            (0xb0, [true, true, false, false]),
            (0xc0, [true, false, false, true]),
            (0xd0, [true, true, false, true]),
        ] {
            for (class, minus) in [(5, MINUS_64), (6, MINUS_32)] {
                let pairs = [(1, 2), (2, 2), (2, 1), (minus, 1)];
                let found = pairs.map(|(a, b)| compare(class, operation, a, b));
                assert_eq!(found, expected.map(Some), "{class} {operation:#x}");
            }
        }
        // Only 32-bit operations ignore the upper half.
        assert_eq!(compare(6, 0x10, 1 << 32 | 7, 7), Some(true));
        assert_eq!(compare(5, 0x10, 1 << 32 | 7, 7), Some(false));
        assert_eq!(compare(5, 0x80, 1, 1), None);
    }

    /// A program that allows one of them is not an allow list.
    #[test]
    fn each_unlisted_device_counts() {
        for (major, minor) in [(4095, 1_048_575), (3071, 77_777), (253, 1_000_003)] {
            let rule = DeviceRule { major, minor };
            let program = extend(&answer(0), &[rule]).unwrap().unwrap();
            let found = interpret(&program, &[GPU]);
            assert_eq!(found, FilterEffect::Denies, "{major}:{minor}");
        }
    }

    #[test]
    fn reading_alone_is_not_enough() {
        // `if access & write: return 0; return 1`
        let start = vec![
            insn(0x61, 2, 1, 0, 0),
            insn(0x74, 2, 0, 0, 16),
            insn(0x45, 2, 0, 2, 4),
        ];
        let read_only = [start, answer(1), answer(0)].concat();
        assert_eq!(interpret(&read_only, &[GPU]), FilterEffect::AllowList);
    }
}
