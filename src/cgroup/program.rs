//! Edits the instructions of cgroup v2 device programs. Pure.
//!
//! The kernel calls a device program for each open(2) and mknod(2) of a device node, with a `struct bpf_cgroup_dev_ctx` in r1.
//! The program returns 1 to allow and 0 to deny. All programs of a cgroup and of its ancestors must allow, so an additional
//! program cannot add access: [`extend`] prepends instructions to an existing program.
//!
//! The kernel's dump of a loaded program can be loaded again, because the kernel translates no context access for this program
//! type (`cg_dev_verifier_ops` in `kernel/bpf/cgroup.c` has no `convert_ctx_access`). [`reloadable`] reverts the other changes.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result, bail};

use base::report::failure;
use base::sys::bpf::Insn;
use findings::catalog;

use crate::oci::device_rules::DeviceRule;

/// `*(u32 *)(src + off)`
const LDX_W: u8 = 0x61;
const AND64_K: u8 = 0x57;
const MOV64_K: u8 = 0xb7;
const MOV32_K: u8 = 0xb4;
const MOV32_X: u8 = 0xbc;
const XOR64_K: u8 = 0xa7;
const XOR64_X: u8 = 0xaf;
const XOR32_K: u8 = 0xa4;
const JEQ_K: u8 = 0x15;
const JNE_K: u8 = 0x55;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;
const JA32: u8 = 0x06;
/// In arithmetic and jumps: the operand is a register, not the immediate.
const SOURCE_X: u8 = 0x08;
const CLASS_JMP: u8 = 5;
const CLASS_JMP32: u8 = 6;

/// `struct bpf_cgroup_dev_ctx { u32 access_type; u32 major; u32 minor; }`
const CTX_ACCESS_TYPE: i16 = 0;
const CTX_MAJOR: i16 = 4;
const CTX_MINOR: i16 = 8;

/// Low half of `access_type`: character device.
const BPF_DEVCG_DEV_CHAR: i32 = 2;
/// High half: `BPF_DEVCG_ACC_READ | BPF_DEVCG_ACC_WRITE`.
const READ_WRITE: i32 = (2 | 4) << 16;

/// Scratch register of the kernel's constant blinding; no program may name it.
const BPF_REG_AX: u8 = 11;

/// Prepends a block to `old` that allows read and write access for every rule; `old` decides about all other accesses.
///
/// `None` if `old` already starts with that block. Jumps are relative, so the old instructions do not change. The block
/// preserves r1, and the verifier guarantees that `old` reads no other register before it writes to it.
pub fn extend(old: &[Insn], rules: &[DeviceRule]) -> Result<Option<Vec<Insn>>> {
    let old = reloadable(old)?;
    let mut program = allow_block(rules)?;
    if old.starts_with(&program) {
        return Ok(None);
    }
    program.extend(old);
    Ok(Some(program))
}

/// ```text
///     r2 = access_type & ~(read | write); if r2 != char goto old
///     r4 = major; r5 = minor
///     if r4 != M goto next major          (the last one: goto old)
///     if r5 == m goto allow               (the last one: if r5 != m goto old)
///     allow: return 1
/// ```
///
/// Each value is compared only once. After `r4 != 195` the verifier knows r4 and would remove a second comparison, and
/// [`extend`] would not recognize the block in the kernel's dump.
fn allow_block(rules: &[DeviceRule]) -> Result<Vec<Insn>> {
    let mut majors: BTreeMap<i32, BTreeSet<i32>> = BTreeMap::new();
    for rule in rules {
        let number = |n| i32::try_from(n).with_context(|| format!("invalid device number: {rule}"));
        majors
            .entry(number(rule.major)?)
            .or_default()
            .insert(number(rule.minor)?);
    }
    let mut block = vec![
        Insn::new(LDX_W, 2, 1, CTX_ACCESS_TYPE, 0),
        Insn::new(AND64_K, 2, 0, 0, !READ_WRITE),
        Insn::new(JNE_K, 2, 0, 0, BPF_DEVCG_DEV_CHAR),
        Insn::new(LDX_W, 4, 1, CTX_MAJOR, 0),
        Insn::new(LDX_W, 5, 1, CTX_MINOR, 0),
    ];
    let end = block.len()
        + majors
            .values()
            .map(|minors| 3 + minors.len())
            .sum::<usize>();
    if let Some(not_ours) = block.get_mut(2) {
        not_ours.off = distance(2, end)?;
    }
    for (major, minors) in majors {
        let start = block.len();
        let allow = start + 1 + minors.len();
        block.push(Insn::new(JNE_K, 4, 0, distance(start, allow + 2)?, major));
        for minor in minors {
            let at = block.len();
            let last = at + 1 == allow;
            block.push(if last {
                Insn::new(JNE_K, 5, 0, distance(at, end)?, minor)
            } else {
                Insn::new(JEQ_K, 5, 0, distance(at, allow)?, minor)
            });
        }
        block.push(Insn::new(MOV64_K, 0, 0, 0, 1));
        block.push(Insn::new(EXIT, 0, 0, 0, 0));
    }
    Ok(block)
}

fn distance(from: usize, to: usize) -> Result<i16> {
    let skipped = to.saturating_sub(from + 1);
    i16::try_from(skipped).context("too many device rules for one program")
}

/// Converts the kernel's dump of a program to a form that the kernel loads.
///
/// For some machines (ppc64le, riscv64, s390x), the verifier adds zero-extensions: 32-bit moves of a register to itself with
/// the immediate 1. In a program that is loaded, the immediate must be 0, which has the same effect.
fn reloadable(old: &[Insn]) -> Result<Vec<Insn>> {
    let mut plain = unblind(old)?;
    if plain
        .iter()
        .any(|insn| insn.dst() == BPF_REG_AX || insn.src() == BPF_REG_AX)
    {
        return Err(failure(
            &catalog::CGROUP,
            "its constants are blinded in an unknown way",
            UNBLIND_HINT,
        ));
    }
    for insn in &mut plain {
        if insn.code == MOV32_X && insn.imm == 1 {
            insn.imm = 0;
        }
    }
    Ok(plain)
}

/// Reverts the constant blinding of `net.core.bpf_jit_harden = 2` (`bpf_jit_blind_insn` in `kernel/bpf/core.c`):
/// `dst OP imm` was made `ax = imm ^ random; ax ^= random; dst OP ax`, and `dst = 0` was made `dst ^= dst`.
fn unblind(old: &[Insn]) -> Result<Vec<Insn>> {
    let mut plain = Vec::with_capacity(old.len());
    // the new index of each old instruction, and the old index of each new one
    let mut moved = Vec::with_capacity(old.len() + 1);
    let mut origins = Vec::with_capacity(old.len());
    let mut rest = old;
    while let Some((first, tail)) = rest.split_first() {
        let (insn, length) = match rest {
            [hidden, random, user, ..] if is_blinding(hidden, random, user) => (
                Insn::new(
                    user.code & !SOURCE_X,
                    user.dst(),
                    0,
                    user.off,
                    hidden.imm ^ random.imm,
                ),
                3,
            ),
            _ if first.code == XOR64_X && first.dst() == first.src() => {
                (Insn::new(MOV64_K, first.dst(), 0, 0, 0), 1)
            }
            _ => (*first, 1),
        };
        moved.extend(std::iter::repeat_n(plain.len(), length));
        origins.push(moved.len() - 1);
        plain.push(insn);
        rest = tail.get(length - 1..).unwrap_or_default();
    }
    moved.push(plain.len());
    let shorter = plain.len() < old.len();
    for (at, (insn, origin)) in plain.iter_mut().zip(origins).enumerate() {
        match insn.code {
            EXIT => continue,
            // these store their distance in another field; device programs of runtimes do not use them
            CALL | JA32 if shorter => {
                bail!("it calls functions or jumps far, and its constants are blinded")
            }
            CALL | JA32 => continue,
            code if !matches!(code & 7, CLASS_JMP | CLASS_JMP32) => continue,
            _ => {}
        }
        let target = (origin + 1)
            .checked_add_signed(insn.off.into())
            .and_then(|old| moved.get(old));
        let target = *target.context("a jump leaves the program")?;
        let off = i64::try_from(target)? - i64::try_from(at)? - 1;
        insn.off = i16::try_from(off).context("a jump in it is too long")?;
    }
    Ok(plain)
}

fn is_blinding(hidden: &Insn, random: &Insn, user: &Insn) -> bool {
    let on_ax =
        |insn: &Insn, codes: [u8; 2]| codes.contains(&insn.code) && insn.dst() == BPF_REG_AX;
    let takes_operand = !matches!(user.code & 7, 0..=3) && user.code & SOURCE_X != 0;
    on_ax(hidden, [MOV64_K, MOV32_K])
        && on_ax(random, [XOR64_K, XOR32_K])
        && takes_operand
        && user.src() == BPF_REG_AX
        && user.dst() != BPF_REG_AX
}

/// The hint if a hardened kernel withholds the instructions of a program.
pub(super) const UNBLIND_HINT: &str = "set the sysctl net.core.bpf_jit_harden to 1, or have the engine list the devices in config.json (CDI)";

#[cfg(test)]
mod tests;
