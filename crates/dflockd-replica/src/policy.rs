//! The settings of the policy, each once.
//!
//! A row of [`policy_settings!`](crate::policy_settings) is all that a setting of the policy has in common at every
//! place that knows the policy: [`POLICY_SETTINGS`], which operators see and change, [`Policy::differences`], the flags
//! of a server, and the message of the gRPC API. A field of [`Limits`] or [`Policy`] without a row does not compile.

use std::ops::RangeInclusive;

use dflockd_core::check::SECONDS_MAX;
use dflockd_core::{Limits, Span};

use self::Valid::{Bool, Fixed, Number, Release};
use super::types::{AutoRelease, Policy};

/// Hands the settings of the policy to the macro `$make`, which makes something of them.
///
/// A row is `field = name, version that introduced it, valid values, (field of the server's settings), field of the
/// gRPC message;`. The name is that of the flag. Times are whole seconds for operators.
///
/// The rows of `limits` are fields of [`Limits`](dflockd_core::Limits), those of `own` fields of the
/// [`Policy`](crate::types::Policy) itself.
#[macro_export]
macro_rules! policy_settings {
    ($make:ident) => {
        $make! {
            limits {
                locks_max = "max-locks", 1, Number(1..=u64::MAX), (max_locks), max_locks;
                keys_max = "max-keys", 1, Number(0..=u64::MAX), (max_keys), max_keys;
                list_length_max = "max-list-length", 1, Number(0..=u64::MAX), (max_list_length), max_list_length;
                waiters_max = "max-waiters", 1, Number(0..=u64::MAX), (max_waiters), max_waiters;
                subscriptions_max = "max-subscriptions", 1, Number(0..=u64::MAX), (max_subscriptions),
                    max_subscriptions;
                value_bytes_max = "max-value-bytes", 1, Number(1..=1_048_576), (max_value_bytes), max_value_bytes;
                default_lease = "default-lease-ttl", 1, Number(1..=SECONDS_MAX), (default_lease_ttl),
                    default_lease_ttl_s;
                idle_max = "gc-max-idle", 1, Number(0..=SECONDS_MAX), (gc_max_idle), gc_max_idle_s;
                gc_interval = "gc-interval", 1, Number(1..=SECONDS_MAX), (gc_interval), gc_interval_s;
                shared_namespace = "shared-key-namespace", 1, Fixed, (shared_key_namespace), shared_key_namespace;
                kv_idle_gc = "kv-idle-gc", 1, Bool, (kv_idle_gc), kv_idle_gc;
                failover_grace = "failover-grace", 1, Number(0..=60), (failover_grace), failover_grace_s;
                lease_max = "max-lease-ttl", 2, Number(0..=SECONDS_MAX), (max_lease_ttl), max_lease_ttl_s;
                holds_per_session_max = "max-holds-per-session", 2, Number(0..=u64::MAX), (max_holds_per_session),
                    max_holds_per_session;
                waits_per_session_max = "max-waits-per-session", 2, Number(0..=u64::MAX), (max_waits_per_session),
                    max_waits_per_session;
                sessions_max = "max-sessions", 2, Number(0..=u64::MAX), (max_sessions), max_sessions;
                subscription_bytes_max = "max-subscription-bytes", 2, Number(0..=u64::MAX), (max_subscription_bytes),
                    max_subscription_bytes;
                subscriptions_total_max = "max-subscriptions-total", 2, Number(0..=u64::MAX),
                    (max_subscriptions_total), max_subscriptions_total;
                subscription_bytes_total_max = "max-subscription-bytes-total", 2, Number(0..=u64::MAX),
                    (max_subscription_bytes_total), max_subscription_bytes_total;
            }
            own {
                auto_release = "auto-release", 1, Release, (disconnect_policy()), auto_release;
                orphan_ttl = "orphan-ttl", 1, Number(0..=SECONDS_MAX), (orphan_ttl), orphan_ttl_s;
            }
        }
    };
}

/// A setting of the policy.
#[derive(Debug)]
pub struct PolicySetting {
    /// The name of its flag.
    pub name: &'static str,
    /// The version of the rules that introduced it.
    version: u32,
    valid: Valid,
    get: fn(&Policy) -> PolicyValue,
    /// Whether the value is of its kind; then it is set.
    set: fn(&mut Policy, PolicyValue) -> bool,
    equal: fn(&Policy, &Policy) -> bool,
}

/// The value of a setting as operators have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyValue {
    /// How many, or how many seconds.
    Number(u64),
    /// Whether.
    Bool(bool),
    /// What the end of a connection means.
    Release(AutoRelease),
}

/// What a setting can be changed to.
#[derive(Debug)]
enum Valid {
    Number(RangeInclusive<u64>),
    Bool,
    Release,
    /// To nothing else than the cluster began with.
    Fixed,
}

impl PolicySetting {
    /// The setting of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static Self> {
        POLICY_SETTINGS.iter().find(|setting| setting.name == name)
    }

    /// What a policy says.
    #[must_use]
    pub fn get(&self, policy: &Policy) -> PolicyValue {
        (self.get)(policy)
    }

    /// Changes a policy.
    ///
    /// # Errors
    ///
    /// What the setting can be, if it can not be that.
    pub fn set(&self, policy: &mut Policy, value: PolicyValue) -> Result<(), String> {
        let valid = match (&self.valid, value) {
            (Number(range), PolicyValue::Number(number)) => range.contains(&number),
            (Bool | Release, _) => true,
            (Number(_) | Fixed, _) => false,
        };
        if valid && (self.set)(policy, value) { Ok(()) } else { Err(self.expected()) }
    }

    /// What the setting can be, for people.
    #[must_use]
    pub fn expected(&self) -> String {
        let name = self.name;
        match &self.valid {
            Number(range) => {
                format!("{name} is a number from {} to {}", range.start(), range.end())
            }
            Bool => format!("{name} is true or false"),
            Release => {
                let [any, clean, lease] = AutoRelease::ALL.map(AutoRelease::word);
                format!("{name} is {any}, {clean} or {lease}")
            }
            Fixed => "the name spaces of a cluster stay what they were at its beginning".into(),
        }
    }
}

impl Policy {
    /// The settings in which two policies differ, by their flags.
    #[must_use]
    pub fn differences(&self, other: &Self) -> Vec<&'static str> {
        // A cluster of version 1 has no settings of version 2, whatever the flags say.
        let alike = self.limits.rules == other.limits.rules;
        let settings = POLICY_SETTINGS.iter().filter(|setting| alike || setting.version == 1);
        let differ = settings.filter(|setting| !(setting.equal)(self, other));
        differ.map(|setting| setting.name).collect()
    }
}

impl AutoRelease {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Any, Self::Clean, Self::Lease];

    /// What it is called.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Any => "any",
            Self::Clean => "clean",
            Self::Lease => "lease",
        }
    }
}

/// A field of the policy as operators have it.
trait Field: Copy {
    fn to_value(self) -> PolicyValue;

    fn from_value(value: PolicyValue) -> Option<Self>;
}

impl Field for u64 {
    fn to_value(self) -> PolicyValue {
        PolicyValue::Number(self)
    }

    fn from_value(value: PolicyValue) -> Option<Self> {
        if let PolicyValue::Number(number) = value { Some(number) } else { None }
    }
}

impl Field for Span {
    fn to_value(self) -> PolicyValue {
        PolicyValue::Number(self.0 / Self::from_secs(1).0)
    }

    fn from_value(value: PolicyValue) -> Option<Self> {
        u64::from_value(value).map(Self::from_secs)
    }
}

impl Field for bool {
    fn to_value(self) -> PolicyValue {
        PolicyValue::Bool(self)
    }

    fn from_value(value: PolicyValue) -> Option<Self> {
        if let PolicyValue::Bool(flag) = value { Some(flag) } else { None }
    }
}

impl Field for AutoRelease {
    fn to_value(self) -> PolicyValue {
        PolicyValue::Release(self)
    }

    fn from_value(value: PolicyValue) -> Option<Self> {
        if let PolicyValue::Release(release) = value { Some(release) } else { None }
    }
}

macro_rules! list {
    (
        limits { $($limit:ident = $limit_name:literal, $limit_version:literal, $limit_valid:expr,
            ($($limit_flag:tt)+), $limit_field:ident;)+ }
        own { $($own:ident = $name:literal, $version:literal, $valid:expr, ($($flag:tt)+), $field:ident;)+ }
    ) => {
        /// Every setting of the policy.
        pub const POLICY_SETTINGS: &[PolicySetting] = &[
            $(list!(limits.$limit, $limit_name, $limit_version, $limit_valid),)+
            $(list!($own, $name, $version, $valid),)+
        ];

        /// Does not compile while a field has no row, unless it is one that no operator sets.
        const _: fn(&Policy) = |policy| {
            let Policy { limits, $($own: _),+ } = policy;
            let Limits {
                $($limit: _,)+
                events_max: _, results_max: _, results_bytes_max: _, expired_notes_max: _,
                rules: _, pattern_tokens_max: _,
            } = limits;
        };
    };
    ($($place:ident).+, $name:literal, $version:literal, $valid:expr) => {
        PolicySetting {
            name: $name,
            version: $version,
            valid: $valid,
            get: |policy| policy.$($place).+.to_value(),
            set: |policy, value| {
                let value = Field::from_value(value);
                value.map(|value| policy.$($place).+ = value).is_some()
            },
            equal: |a, b| a.$($place).+ == b.$($place).+,
        }
    };
}

policy_settings!(list);

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use dflockd_core::LimitsV2;

    use super::*;

    /// What is not the value of any setting by default.
    fn another(setting: &PolicySetting) -> PolicyValue {
        match setting.get(&Policy::default()) {
            PolicyValue::Number(number) => PolicyValue::Number(number + 1),
            PolicyValue::Bool(flag) => PolicyValue::Bool(!flag),
            PolicyValue::Release(_) => PolicyValue::Release(AutoRelease::Lease),
        }
    }

    #[test]
    fn a_setting_changes_what_it_shows_and_nothing_else() {
        for setting in POLICY_SETTINGS {
            let mut policy = Policy::default();
            let value = another(setting);
            assert!((setting.set)(&mut policy, value), "{}", setting.name);
            assert_eq!(setting.get(&policy), value, "{}", setting.name);
            assert_eq!(Policy::default().differences(&policy), [setting.name]);
            let other = match value {
                PolicyValue::Number(_) => PolicyValue::Bool(true),
                PolicyValue::Bool(_) | PolicyValue::Release(_) => PolicyValue::Number(1),
            };
            assert_eq!(
                setting.set(&mut policy, other),
                Err(setting.expected()),
                "{}",
                setting.name
            );
            assert!(!(setting.set)(&mut policy, other), "{}", setting.name);
        }
    }

    #[test]
    fn names_are_those_of_one_setting() {
        let names: BTreeSet<_> = POLICY_SETTINGS.iter().map(|setting| setting.name).collect();
        assert_eq!(names.len(), POLICY_SETTINGS.len());
        assert!(names.iter().all(|name| PolicySetting::named(name).is_some()));
        assert!(PolicySetting::named("max-dreams").is_none());
    }

    #[test]
    fn ranges_and_what_never_changes() {
        let check = |name: &str, value, expected: Result<(), &str>| {
            let setting = PolicySetting::named(name).expect(name);
            let result = setting.set(&mut Policy::default(), value);
            assert_eq!(result, expected.map_err(str::to_owned), "{name} {value:?}");
        };
        let number = PolicyValue::Number;
        check("max-locks", number(1), Ok(()));
        check("max-locks", number(0), Err("max-locks is a number from 1 to 18446744073709551615"));
        check("failover-grace", number(60), Ok(()));
        check("failover-grace", number(61), Err("failover-grace is a number from 0 to 60"));
        check("kv-idle-gc", number(1), Err("kv-idle-gc is true or false"));
        check("auto-release", number(1), Err("auto-release is any, clean or lease"));
        let fixed = "the name spaces of a cluster stay what they were at its beginning";
        check("shared-key-namespace", PolicyValue::Bool(true), Err(fixed));
    }

    #[test]
    fn a_cluster_of_version_1_does_not_differ_in_what_it_has_not() {
        let older = Policy::default().with_v2(LimitsV2::default());
        assert!(Policy::default().differences(&older).is_empty());
        assert!(older.differences(&Policy::default()).is_empty());
        let mut changed = older.clone();
        changed.limits.locks_max += 1;
        assert_eq!(Policy::default().differences(&changed), ["max-locks"]);
    }
}
