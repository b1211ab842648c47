//! The bug bank: mistakes that the simulator must find. Only there with the feature `bugs`; without it no
//! bug is ever on and the switches vanish.

/// A mistake that can be switched on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Bug {
    LeaseResetPerElection = 1,
    EarlyExpiry,
    BarrierShort,
    FenceForgotten,
    ResultsForgotten,
    LostWakeup,
    WriterShares,
    PopKeeps,
    GroupTwice,
    Overtaking,
    ReadAtOnce,
    VoteNotKept,
    AckBeforeSync,
    CountedBeforeSync,
    TimeRunsAhead,
    LostNodeReleases,
    SecretsForgotten,
    NoTick,
    RunKept,
    NoResend,
    StaleMembers,
    UndoKept,
    WrongForm,
    WatchGap,
    WindowForgotten,
    ReplayShort,
    CancelFrees,
    DeadPopper,
    RenewExpired,
    AnyToken,
    FenceReused,
    CasBlind,
    LostIncrement,
    NoGrace,
    GraceForgotten,
    RevisionForgotten,
    ReadTooEarly,
    ReadIdReused,
    BatchTwice,
    DeadRun,
    IdReused,
    LogKept,
    StaleTail,
    LookForgotten,
    SleepBlind,
    TimerUnnoticed,
    DriverExpected,
    DeliveryReversed,
    DeliveryForgotten,
    ReportedUnsynced,
    SessionReused,
    SweepsOverlap,
    UndoElsewhere,
    QuorumUnchecked,
    FenceKept,
    ClusterIdKept,
    GrantsAtOnce,
    HoldsKept,
    BackupStale,
    StartUnsynced,
    TornLine,
    InputForgotten,
    RemovedHeard,
    LocalDecides,
    VoteAssumed,
    CountedFromReply,
    NameNotDrawn,
    FormedTooEarly,
    VoterUnknown,
    NotIntroduced,
    VersionEarly,
    AnswersLeft,
    OldTimeKept,
    AckOnce,
}

impl Bug {
    /// All of them.
    pub const ALL: &'static [Self] = &[
        Self::LeaseResetPerElection,
        Self::EarlyExpiry,
        Self::BarrierShort,
        Self::FenceForgotten,
        Self::ResultsForgotten,
        Self::LostWakeup,
        Self::WriterShares,
        Self::PopKeeps,
        Self::GroupTwice,
        Self::Overtaking,
        Self::ReadAtOnce,
        Self::VoteNotKept,
        Self::AckBeforeSync,
        Self::CountedBeforeSync,
        Self::TimeRunsAhead,
        Self::LostNodeReleases,
        Self::SecretsForgotten,
        Self::NoTick,
        Self::RunKept,
        Self::NoResend,
        Self::StaleMembers,
        Self::UndoKept,
        Self::WrongForm,
        Self::WatchGap,
        Self::WindowForgotten,
        Self::ReplayShort,
        Self::CancelFrees,
        Self::DeadPopper,
        Self::RenewExpired,
        Self::AnyToken,
        Self::FenceReused,
        Self::CasBlind,
        Self::LostIncrement,
        Self::NoGrace,
        Self::GraceForgotten,
        Self::RevisionForgotten,
        Self::ReadTooEarly,
        Self::ReadIdReused,
        Self::BatchTwice,
        Self::DeadRun,
        Self::IdReused,
        Self::LogKept,
        Self::StaleTail,
        Self::LookForgotten,
        Self::SleepBlind,
        Self::TimerUnnoticed,
        Self::DriverExpected,
        Self::DeliveryReversed,
        Self::DeliveryForgotten,
        Self::ReportedUnsynced,
        Self::SessionReused,
        Self::SweepsOverlap,
        Self::UndoElsewhere,
        Self::QuorumUnchecked,
        Self::FenceKept,
        Self::ClusterIdKept,
        Self::GrantsAtOnce,
        Self::HoldsKept,
        Self::BackupStale,
        Self::StartUnsynced,
        Self::TornLine,
        Self::InputForgotten,
        Self::RemovedHeard,
        Self::LocalDecides,
        Self::VoteAssumed,
        Self::CountedFromReply,
        Self::NameNotDrawn,
        Self::FormedTooEarly,
        Self::VoterUnknown,
        Self::NotIntroduced,
        Self::VersionEarly,
        Self::AnswersLeft,
        Self::OldTimeKept,
        Self::AckOnce,
    ];
}

#[cfg(feature = "bugs")]
mod switch {
    use core::sync::atomic::{AtomicU8, Ordering::Relaxed};

    use super::Bug;

    static ON: AtomicU8 = AtomicU8::new(0);

    /// Switches one mistake on, in the whole process, or all off.
    pub fn set(bug: Option<Bug>) {
        ON.store(bug.map_or(0, |bug| bug as u8), Relaxed);
    }

    /// Whether a mistake is to be made.
    #[must_use]
    pub fn bug(bug: Bug) -> bool {
        ON.load(Relaxed) == bug as u8
    }
}

#[cfg(not(feature = "bugs"))]
mod switch {
    use super::Bug;

    /// Whether a mistake is to be made: never.
    #[must_use]
    #[inline(always)]
    pub const fn bug(_: Bug) -> bool {
        false
    }
}

pub use switch::*;
