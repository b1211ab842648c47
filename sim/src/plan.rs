//! What a seed decides before anything happens: the cluster, the load, and which of all faults it will see.

use dflockd_replica::types::AutoRelease;

use crate::rng::Rng;

/// A millisecond in nanoseconds.
pub const MS: u64 = 1_000_000;
/// A second in nanoseconds.
pub const SEC: u64 = 1_000 * MS;

macro_rules! kinds {
    ($(#[$doc:meta])* $name:ident { $($kind:ident = $text:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        #[expect(missing_docs, reason = "the names say it")]
        pub enum $name { $($kind,)+ }

        impl $name {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$kind,)+];

            /// As it is written on a command line.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$kind => $text,)+ }
            }
        }
    };
}

kinds! {
    /// What can go wrong.
    Fault {
        Kill = "kill",
        Power = "power",
        PowerAll = "power-all",
        Partition = "partition",
        OneWay = "one-way",
        Loss = "loss",
        Duplicate = "duplicate",
        Reorder = "reorder",
        Clog = "clog",
        SlowDisk = "slow-disk",
        StallDisk = "stall-disk",
        FailSync = "fail-sync",
        FullDisk = "full-disk",
        Rot = "rot",
        Pause = "pause",
        Drift = "drift",
        ClientCut = "client-cut",
        Transfer = "transfer",
        Membership = "membership",
        HangDisk = "hang-disk",
        WildClock = "wild-clock",
    }
}

impl Fault {
    /// Those that came later have a stream of chance of their own, so that older seeds stay what they were.
    const LATER: &[Self] = &[Self::HangDisk, Self::WildClock];
}

kinds! {
    /// What clients do.
    Kind {
        Lock = "lock",
        TryLock = "try-lock",
        TwoPhase = "two-phase",
        Semaphore = "semaphore",
        ReadWrite = "read-write",
        Election = "election",
        Counter = "counter",
        CounterSet = "counter-set",
        Kv = "kv",
        Cas = "cas",
        KvTtl = "kv-ttl",
        List = "list",
        BlockingPop = "blocking-pop",
        Barrier = "barrier",
        Signal = "signal",
        Watch = "watch",
        Observe = "observe",
        Kept = "kept",
        Kick = "kick",
        Force = "force",
        Cancel = "cancel",
        Sync = "sync",
        Abandon = "abandon",
    }
}

/// What is switched off, whatever the seed says.
#[derive(Clone, Debug, Default)]
pub struct Switches {
    /// By name.
    pub off: Vec<String>,
}

impl Switches {
    fn allows(&self, name: &str) -> bool {
        !self.off.iter().any(|off| off == name)
    }
}

/// The plan of one run.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Plan {
    pub seed: u64,
    pub voters: u64,
    pub witness: bool,
    pub clients: usize,
    pub keys: u64,
    pub kinds: Vec<Kind>,
    pub faults: Vec<Fault>,
    /// How long faults go on.
    pub storm: u64,
    /// Between two faults, on average.
    pub fault_gap: u64,
    pub snapshot_entries: u64,
    pub segment_bytes: u64,
    pub auto_release: AutoRelease,
    pub lease_min: u64,
    pub lease_max: u64,
    pub think: u64,
    pub outstanding: usize,
    pub delay: u64,
    pub jitter: u64,
    pub sync: u64,
    /// How much clocks of nodes and clients run too fast or too slow, at most.
    pub drift_ppm: u64,
}

impl Plan {
    /// The plan of a seed.
    #[must_use]
    pub fn new(seed: u64, switches: &Switches) -> Self {
        let rng = &mut Rng::new(seed, 1);
        let voters = *rng.pick(&[1, 3, 3, 3, 3, 3, 3, 5, 5, 7]);
        let share = *rng.pick(&[150, 300, 500, 800]);
        let mut kinds: Vec<Kind> =
            Kind::ALL.iter().copied().filter(|_| rng.chance(share.max(300))).collect();
        if kinds.is_empty() {
            kinds.push(Kind::Lock);
        }
        let mut faults: Vec<Fault> =
            Fault::ALL.iter().copied().filter(|fault| !Fault::LATER.contains(fault)).collect();
        faults.retain(|_| rng.chance(share));
        let later = &mut Rng::new(seed, 9);
        faults.extend(Fault::LATER.iter().filter(|_| later.chance(100)));
        let calm = rng.chance(50);
        if calm {
            faults.clear();
        }
        let witness = voters == 3 && rng.chance(150);
        let storm = rng.between(10, 40) * SEC;
        let fault_gap = *rng.pick(&[200, 600, 1500, 4000]) * MS;
        let snapshot_entries = *rng.pick(&[20, 60, 200, 1000]);
        let segment_bytes = *rng.pick(&[8 << 10, 32 << 10, 128 << 10]);
        let auto_release = *rng.pick(&[
            AutoRelease::Clean,
            AutoRelease::Clean,
            AutoRelease::Lease,
            AutoRelease::Any,
        ]);
        let lease_min = *rng.pick(&[300, 1000, 2000]) * MS;
        let lease_max = lease_min * rng.between(1, 4);
        let (delay, jitter) =
            *rng.pick(&[(100_000, 50_000), (500_000, 500_000), (2 * MS, MS), (20 * MS, 20 * MS)]);
        let clients_max = *rng.pick(&[4, 8, 16]);
        let mut plan = Self {
            seed,
            voters,
            witness,
            clients: rng.index(clients_max) + 1,
            keys: rng.between(1, *Rng::new(seed, 7).pick(&[1, 3, 8])),
            kinds: Vec::new(),
            faults: Vec::new(),
            storm,
            fault_gap,
            snapshot_entries,
            segment_bytes,
            auto_release,
            lease_min,
            lease_max,
            think: *rng.pick(&[5, 20, 100, 400]) * MS,
            outstanding: rng.index(3) + 1,
            delay,
            jitter,
            sync: *rng.pick(&[50_000, 500_000, 3 * MS]),
            drift_ppm: if rng.chance(700) { 5000 } else { 0 },
        };
        kinds.retain(|kind| switches.allows(kind.name()));
        faults.retain(|fault| switches.allows(fault.name()));
        if kinds.is_empty() {
            kinds.push(Kind::Lock);
        }
        if !faults.contains(&Fault::Drift) {
            plan.drift_ppm = 0;
        }
        if faults.contains(&Fault::WildClock) {
            plan.drift_ppm = 50_000;
        }
        (plan.kinds, plan.faults) = (kinds, faults);
        plan
    }

    /// Whether clocks keep the rate that clients rely on: exclusion of clients is not promised otherwise, but all that
    /// is measured in cluster time.
    #[must_use]
    pub fn keeps_rate(&self) -> bool {
        !self.has(Fault::WildClock)
    }

    /// Whether the seed has this fault.
    #[must_use]
    pub fn has(&self, fault: Fault) -> bool {
        self.faults.contains(&fault)
    }
}
