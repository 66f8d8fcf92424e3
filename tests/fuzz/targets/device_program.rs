//! Device programs of cgroup v2 as the kernel shows them, possibly with blinded constants. One byte is the number of
//! rules, followed by eight bytes for each rule, then eight for each instruction.

use base::sys::bpf::Insn;
use oci_nvidia_hook::testing::cgroup::extend;
use oci_nvidia_hook::testing::oci::device_rules::DeviceRule;

use super::check_error;

/// The scratch register of constant blinding.
const AX: u8 = 11;
const CLASS_ALU: u8 = 4;
const CLASS_JMP: u8 = 5;
const CLASS_JMP32: u8 = 6;
const CLASS_ALU64: u8 = 7;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;
const JA32: u8 = 0x06;
const MOV64_K: u8 = 0xb7;
const MOV32_K: u8 = 0xb4;
const XOR64_X: u8 = 0xaf;

/// Extends the program unchanged, and after blinding it like the kernel.
pub fn run(data: &[u8]) {
    let Some((&first, data)) = data.split_first() else {
        return;
    };
    let count = usize::from(first % 4) + 1;
    let Some((rules, program)) = data.split_at_checked(count * 8) else {
        return;
    };
    let number = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().unwrap());
    let rules: Vec<_> = rules
        .chunks_exact(8)
        .map(|rule| DeviceRule {
            major: number(&rule[..4]),
            minor: number(&rule[4..]),
        })
        .collect();
    let insn = |bytes: &[u8]| {
        let off = i16::from_le_bytes([bytes[2], bytes[3]]);
        Insn::new(
            bytes[0],
            bytes[1] & 15,
            bytes[1] >> 4,
            off,
            number(&bytes[4..]).cast_signed(),
        )
    };
    let program: Vec<_> = program.chunks_exact(8).map(insn).collect();
    let extended = extend(&program, &rules);
    match &extended {
        Ok(Some(longer)) => check_extended(&program, longer, &rules),
        Ok(None) => {}
        Err(error) => return check_error(error),
    }
    let plain =
        |insn: &Insn| insn.dst() < AX && insn.src() < AX && !matches!(insn.code, CALL | JA32);
    if program.iter().all(plain) {
        let same = extend(&program.iter().map(canonical).collect::<Vec<_>>(), &rules)
            .expect("the same program");
        if let Some(blinded) = blind(&program, number(&[first, 0x5a, 0xa5, first]).cast_signed()) {
            assert_eq!(
                extend(&blinded, &rules).expect("as the kernel blinds"),
                same,
                "{program:?}"
            );
        }
    }
}

fn check_extended(old: &[Insn], longer: &[Insn], rules: &[DeviceRule]) {
    assert!(
        longer.len() <= old.len() + 5 + rules.len() * 4,
        "{} of {}",
        longer.len(),
        old.len()
    );
    assert_eq!(
        extend(longer, rules).expect("a program of ours"),
        None,
        "extending twice is extending once"
    );
    for (at, insn) in longer.iter().enumerate() {
        assert!(
            insn.dst() != AX && insn.src() != AX,
            "{insn:?} names the kernel's register"
        );
        if is_jump(insn) {
            let target = (at + 1).checked_add_signed(insn.off.into());
            assert!(
                target.is_some_and(|target| target <= longer.len()),
                "{insn:?} at {at} leads out of it"
            );
        }
    }
}

fn is_jump(insn: &Insn) -> bool {
    matches!(insn.code & 7, CLASS_JMP | CLASS_JMP32) && !matches!(insn.code, CALL | EXIT | JA32)
}

/// Blinding turns both instructions that set a register to zero into the same one.
fn canonical(insn: &Insn) -> Insn {
    let zero = insn.imm == 0 && matches!(insn.code, MOV32_K | MOV64_K);
    if zero {
        Insn::new(MOV64_K, insn.dst(), 0, 0, 0)
    } else {
        *insn
    }
}

/// `bpf_jit_blind_constants` in the kernel's kernel/bpf/core.c; `None` if a jump gets too long, or leads out of the program.
fn blind(program: &[Insn], random: i32) -> Option<Vec<Insn>> {
    let lengths: Vec<usize> = program
        .iter()
        .map(|insn| if takes_constant(insn) { 3 } else { 1 })
        .collect();
    let start = |at: usize| lengths.get(..at).map(|before| before.iter().sum::<usize>());
    let mut blinded = Vec::new();
    for (at, insn) in program.iter().enumerate() {
        let mut insn = *insn;
        if is_jump(&insn) {
            let target = start((at + 1).checked_add_signed(insn.off.into())?)?;
            let next = start(at + 1)?;
            insn.off = (i64::try_from(target).ok()? - i64::try_from(next).ok()?)
                .try_into()
                .ok()?;
        }
        if insn.imm == 0 && matches!(insn.code, MOV32_K | MOV64_K) {
            blinded.push(Insn::new(XOR64_X, insn.dst(), insn.dst(), 0, 0));
        } else if takes_constant(&insn) {
            let wide = !matches!(insn.code & 7, CLASS_ALU | CLASS_JMP32);
            let (mov, xor) = if wide {
                (MOV64_K, 0xa7)
            } else {
                (MOV32_K, 0xa4)
            };
            blinded.push(Insn::new(mov, AX, 0, 0, random ^ insn.imm));
            blinded.push(Insn::new(xor, AX, 0, 0, random));
            blinded.push(Insn::new(insn.code | 8, insn.dst(), AX, insn.off, 0));
        } else {
            blinded.push(insn);
        }
    }
    Some(blinded)
}

/// `bpf_jit_blind_insn`: arithmetic except for shifts, and comparisons, with an immediate.
fn takes_constant(insn: &Insn) -> bool {
    let operation = insn.code & 0xf0;
    let zero = insn.imm == 0 && matches!(insn.code, MOV32_K | MOV64_K);
    insn.code & 8 == 0
        && insn.src() == 0
        && !zero
        && match insn.code & 7 {
            CLASS_ALU | CLASS_ALU64 => matches!(operation, 0x00..=0x50 | 0x90..=0xb0),
            CLASS_JMP | CLASS_JMP32 => matches!(operation, 0x10..=0x70 | 0xa0..=0xd0),
            _ => false,
        }
}
