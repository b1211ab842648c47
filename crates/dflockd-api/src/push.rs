//! What clients are told without having asked at that moment: signals, changes, leaders, lost holds.

use serde::{Deserialize, Serialize};

use crate::types::{Bytes, Fence, Revision};

/// A line for a subscriber.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Push {
    /// A signal.
    Signal {
        /// Where it was sent.
        channel: Bytes,
        /// What was sent.
        payload: Bytes,
    },
    /// A change of a watched key.
    Change(Change),
    /// News of an election.
    Leader {
        /// What happened.
        event: LeaderEvent,
        /// Which election.
        key: Bytes,
    },
    /// A hold of this session ended other than by its release.
    Lost {
        /// The lock.
        key: Bytes,
        /// The hold.
        fence: Fence,
        /// Why.
        reason: LostReason,
    },
}

/// A change of a key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// The revision it made.
    pub revision: Revision,
    /// What happened.
    pub event: Event,
    /// To which key.
    pub key: Bytes,
}

/// Enums whose variants have a name on every API.
macro_rules! named {
    ($(
        $(#[$doc:meta])*
        $enum:ident { $($(#[$variant_doc:meta])* $variant:ident $name:literal)* }
    )*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
            pub enum $enum {
                $($(#[$variant_doc])* $variant,)*
            }

            impl $enum {
                /// Its name on lines, over HTTP and for people.
                #[must_use]
                pub const fn name(self) -> &'static str {
                    match self {
                        $(Self::$variant => $name,)*
                    }
                }

                /// The one with this name.
                #[must_use]
                pub fn parse(name: &str) -> Option<Self> {
                    match name {
                        $($name => Some(Self::$variant),)*
                        _ => None,
                    }
                }
            }
        )*
    };
}

named! {
    /// What can happen to a key.
    #[expect(missing_docs, reason = "the names of the wire protocol")]
    Event {
        Acquire "acquire"
        Release "release"
        Elect "elect"
        Resign "resign"
        Incr "incr"
        Decr "decr"
        Cset "cset"
        Kset "kset"
        Kdel "kdel"
        Kcas "kcas"
        Lpush "lpush"
        Rpush "rpush"
        Lpop "lpop"
        Rpop "rpop"
        Blpop "blpop"
        Brpop "brpop"
    }
    /// What can happen to a leader.
    LeaderEvent {
        /// Somebody leads.
        Elected "elected"
        /// The leader gave up.
        Resigned "resigned"
        /// A queued one takes over.
        Failover "failover"
    }
    /// Why a hold ended.
    LostReason {
        /// Its lease ran out.
        Expired "expired"
        /// An operator ended it.
        Forced "forced"
        /// Its session ended.
        Session "session"
    }
}
