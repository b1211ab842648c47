//! Versions of what stands in the log and in snapshots: how a cluster goes from one program to the next.
//!
//! A program reads every version up to its newest, and says that number when it starts. The cluster uses one that all
//! members read, until an operator raises it ([`AdminRequest::Finalize`]); that is an entry of the log, so all go over
//! at the same place. Each entry begins with the version in force when it was written, and a snapshot with a form that
//! belongs to it. So nothing is written that a member can not read, every member can go back to the program it had
//! until the version is raised, and a program that is too old stops at the first byte that is too new for it.
//!
//! Whoever adds a form raises [`NEWEST`], and writes the new form only if [`Machine::version`] has reached it.
//!
//! A cluster begins with version 1, because its first leader does not know what the others read. If all members have
//! said so and no older program has ever been one of them, there is nothing to go back to: the leader then raises the
//! version by itself ([`Machine::first_version`]). What a version adds to the policy comes into force with the policy
//! that the leader proposes next, of the one in force and its own settings ([`Machine::lacks_limits`]).
//!
//! [`AdminRequest::Finalize`]: super::admin::AdminRequest::Finalize
//! [`Machine::version`]: super::machine::Machine::version
//! [`Machine::first_version`]: super::machine::Machine::first_version
//! [`Machine::lacks_limits`]: super::machine::Machine::lacks_limits
//!
//! `Start` tells the newest version that a member reads.
//! [`LeaderCommand::Version`](super::types::LeaderCommand::Version) raises the version of the cluster from that entry
//! on, if all members read it at that place of the log; `apply` may do something new only from there on. A member that
//! reads less stops at its start, before it has written anything. Version 2 brought limits for leases, sessions and
//! subscriptions, the rules that go by them (`Limits::rules`), and sealed frames between peers without TLS. Version 3
//! brought a random name of the cluster. Version 4 brought names and references of clients: what a client with a
//! reference leaves behind waits for it. Only what such an item has made known is treated like that. Besides, a session
//! that has ended is remembered for longer from there on ([`ENDED_FOR_GOOD`]). So nothing of an older log means
//! anything else.
//!
//! # The id of a cluster
//!
//! The first members of `--cluster-peers` take part when they know each other's data directories, and begin with an id
//! that follows from those (`dflockd-engine`, `replicated/formation.rs`): nobody else has it, and no two nodes have
//! the same number in one cluster. Programs of versions 1 and 2 began with an id of the list alone, which another
//! cluster of the same list had as well. A cluster that has reached version 3 therefore takes an id that its leader
//! has drawn ([`LeaderCommand::ClusterId`]), once, and remembers the one before ([`Machine::formed_as`]). From the
//! entry on a node presents the new one. A member that has not applied the entry presents the old one, and is listened
//! to only if it has the data directory that this member had when the entry was made: all are known by then
//! ([`Machine::lacks_name`]).
//!
//! [`LeaderCommand::ClusterId`]: super::types::LeaderCommand::ClusterId
//! [`Machine::formed_as`]: super::machine::Machine::formed_as
//! [`Machine::lacks_name`]: super::machine::Machine::lacks_name

use std::sync::OnceLock;

use raft::eraftpb::{Entry, EntryType};

use super::codec;
use super::log::Recovered;
use super::machine;

/// The newest version of which this program knows what it means.
///
/// | Version | What it brought |
/// | --- | --- |
/// | 1 | the first |
/// | 2 | [`LimitsV2`](dflockd_core::LimitsV2) behind a policy, in orders and snapshots; the rules that go with them |
/// | 3 | [`LeaderCommand::ClusterId`](super::types::LeaderCommand::ClusterId); the name before it in snapshots |
/// | 4 | [`Identify`](super::types::ProposalBody::Identify); clients' names in snapshots; [`ENDED_FOR_GOOD`] |
pub const NEWEST: u32 = 4;

/// The first version in which a cluster has a name that nobody else has.
pub const NAMED: u32 = 3;

/// The first version in which sessions say who is behind them.
pub const IDENTIFIED: u32 = 4;

/// The first version in which a session that has ended is remembered until the connection that began it has ended, too;
/// before, the end of any connection that had attached to it was enough.
pub const ENDED_FOR_GOOD: u32 = 4;

/// The first version whose programs seal the frames between peers. A cluster that uses it has no other members, so its
/// nodes speak no older version of the peer protocol without TLS.
pub const SEALED: u32 = 2;

/// For tests of upgrades, and for nothing else: the version up to which this process says it reads. One above
/// [`NEWEST`] stands for the next program, whose forms are those of this one under the next number.
pub const PRETENDED: &str = "DFLOCKD_CLUSTER_VERSION_MAX";
/// Behind the number: the process does not seal frames between peers either, as the programs before [`SEALED`].
const UNSEALED: &str = "-unsealed";

/// The newest version that this process reads.
#[must_use]
pub fn newest() -> u32 {
    static READS: OnceLock<u32> = OnceLock::new();
    *READS.get_or_init(|| match pretended() {
        Some(version) => {
            tracing::warn!(version, "{PRETENDED} is set, which is for tests of upgrades only");
            version
        }
        None => NEWEST,
    })
}

fn pretended() -> Option<u32> {
    let value = std::env::var(PRETENDED).ok()?;
    let version = value.strip_suffix(UNSEALED).unwrap_or(&value).parse().ok();
    version.filter(|version| (1..=NEWEST + 1).contains(version))
}

/// Whether this program seals frames between peers without TLS. Only one that pretends to be older does not.
#[must_use]
pub fn seals_frames() -> bool {
    !std::env::var(PRETENDED).is_ok_and(|value| value.ends_with(UNSEALED))
}

/// Says that something was written by a program that is newer than this one.
pub(super) fn too_new(form: u8, known: u32) -> String {
    format!(
        "written in form {form} by a newer server, this one reads forms up to {known}; start the newer one: after \
         `cluster finalize` there is no way back"
    )
}

/// The version of an entry, if it has one: the first of a term is empty.
#[must_use]
pub fn of_entry(entry: &Entry) -> Option<u8> {
    let ours = match entry.entry_type {
        EntryType::EntryNormal => &entry.data,
        EntryType::EntryConfChange | EntryType::EntryConfChangeV2 => &entry.context,
    };
    ours.first().copied()
}

/// Whether the log has an entry of this version or a newer one: then the cluster uses it, although this node may not
/// have applied again what says so.
pub fn is_used(entries: &[Entry], version: u32) -> bool {
    entries.iter().filter_map(of_entry).any(|of_entry| u32::from(of_entry) >= version)
}

/// Whether this program reads all that it finds in its data directory. To be asked before anything is written there.
pub fn check(recovered: &Recovered) -> Result<(), String> {
    if let Some(snapshot) = &recovered.snapshot {
        machine::check_form(&snapshot.data)?;
    }
    for entry in &recovered.entries {
        if let Some(version) = of_entry(entry).filter(|version| u32::from(*version) > newest()) {
            let error = codec::Malformed::Version(version);
            return Err(format!("entry {}: {error}", entry.index));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::StoredSnapshot;

    /// GUARANTEES 48: a node that is started again knows whether frames must be sealed before it dials anybody.
    #[test]
    fn entries_say_which_version_is_used() {
        let entry = |data: &[u8]| Entry { data: data.to_vec().into(), ..Entry::default() };
        let change = Entry { context: vec![2].into(), ..entry(&[]) };
        let change = Entry { entry_type: EntryType::EntryConfChange, ..change };
        assert!(!is_used(&[], SEALED));
        assert!(!is_used(&[entry(&[1, 9]), entry(&[])], SEALED));
        assert!(is_used(&[entry(&[1, 0]), entry(&[2, 0]), entry(&[])], SEALED));
        assert!(is_used(&[entry(&[1]), change], SEALED));
    }

    /// GUARANTEES 42: a program reads its own version, and stops before it writes anything if there is a newer one.
    #[test]
    fn what_is_newer_is_found_before_anything_is_written() {
        let recovered = |version: u32, form: Option<u8>| {
            let data = vec![u8::try_from(version).unwrap(), 0].into();
            let (metadata, digest) = Default::default();
            let stored = |form| StoredSnapshot { metadata, data: vec![form].into(), digest };
            Recovered {
                hard_state: Default::default(),
                notes: Default::default(),
                snapshot: form.map(stored),
                entries: vec![Entry { index: 7, data, ..Entry::default() }],
                cut: false,
            }
        };
        let newest_form = u8::try_from(newest() + 1).unwrap();
        assert_eq!(check(&recovered(newest(), None)), Ok(()));
        assert_eq!(check(&recovered(1, Some(newest_form))), Ok(()));
        let why = check(&recovered(newest() + 1, None)).unwrap_err();
        assert!(why.starts_with("entry 7: "), "{why}");
        let why = check(&recovered(1, Some(newest_form + 1))).unwrap_err();
        assert!(why.contains("newer server"), "{why}");
    }
}
