//! What a seed decides before anything happens: the cluster, the load, and which of all faults it will see.

use dflockd_core::Span;
use dflockd_replica::types::AutoRelease;

use crate::line_client::Face;
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

/// How many of a thousand seeds have a long life.
const LONG_LIVES: u64 = 300;

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
        Drain = "drain",
        Stall = "stall",
        Upgrade = "upgrade",
        SlowReader = "slow-reader",
        Quorum = "quorum",
        Away = "away",
        Restore = "restore",
        ForceNew = "force-new",
        Starts = "starts",
        TornLines = "torn-lines",
        Exchange = "exchange",
    }
}

impl Fault {
    /// Those that came later have a stream of chance of their own, so that older seeds stay what they were: how many of
    /// a thousand seeds have each.
    const LATER: &[(Self, u64)] = &[
        (Self::HangDisk, 100),
        (Self::WildClock, 100),
        (Self::Quorum, 150),
        (Self::Away, 250),
        (Self::Drain, 150),
        (Self::Stall, 150),
        (Self::Upgrade, 100),
        (Self::SlowReader, 150),
        (Self::Restore, 70),
        (Self::ForceNew, 70),
        (Self::Starts, 120),
        (Self::TornLines, 150),
        (Self::Exchange, 150),
    ];

    fn is_later(self) -> bool {
        Self::LATER.iter().any(|(later, _)| *later == self)
    }
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
    /// Every second client only reads. A read waits for what others asked of the same node before it, so a node that is
    /// behind is caught by those who ask for nothing else.
    pub readers: bool,
    pub outstanding: usize,
    pub delay: u64,
    pub jitter: u64,
    pub sync: u64,
    /// How often another thread of a node comes in between at a point where one may, per mille.
    pub between: u64,
    /// How clients speak to the nodes.
    pub faces: Vec<Face>,
    /// How much clocks of nodes and clients run too fast or too slow, at most.
    pub drift_ppm: u64,
    /// After the storm, how long until all must be well.
    pub settle: u64,
    /// How long clients work on then.
    pub calm: u64,
    /// And how long it takes until nothing may be left of them: requests, kept sessions, leases.
    pub drain: u64,
    /// How many times longer than usual waits, pauses before retries and faults last.
    pub pace: u64,
    pub election: u64,
    pub gc_interval: u64,
    /// How late a thread may wake that has nothing to do at once.
    pub drowsy: u64,
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
            Fault::ALL.iter().copied().filter(|fault| !fault.is_later()).collect();
        faults.retain(|_| rng.chance(share));
        let mut later = Rng::new(seed, 9);
        let chosen = Fault::LATER.iter().filter(|(_, chance)| later.chance(*chance));
        faults.extend(chosen.map(|(fault, _)| fault));
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
        let threads = &mut Rng::new(seed, 10);
        let between = *threads.pick(&[0, 30, 100, 400]);
        let mut faces: Vec<Face> =
            Face::ALL.iter().copied().filter(|_| threads.chance(600)).collect();
        if faces.is_empty() {
            faces.push(Face::Calls);
        }
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
            readers: Rng::new(seed, 10).chance(300),
            outstanding: rng.index(3) + 1,
            delay,
            jitter,
            sync: *rng.pick(&[50_000, 500_000, 3 * MS]),
            between,
            faces,
            drift_ppm: if rng.chance(700) { 5000 } else { 0 },
            settle: 12 * SEC,
            calm: 8 * SEC,
            drain: 30 * SEC,
            pace: 1,
            election: SEC,
            gc_interval: SEC,
            drowsy: 0,
        };
        let mut lives = Rng::new(seed, 14);
        if lives.chance(LONG_LIVES) && switches.allows("long-life") {
            plan.live_long(&mut lives);
        }
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

    /// Makes it the plan of a long life: few clients that think for long, rare faults, leases of minutes, and a storm
    /// that lasts up to an hour. Timeouts are long as well, so that idle nodes have little to do.
    fn live_long(&mut self, rng: &mut Rng) {
        self.clients = rng.index(4) + 1;
        self.think = *rng.pick(&[5, 10, 20]) * SEC;
        self.outstanding = 1;
        self.storm = rng.between(300, 3600) * SEC;
        self.fault_gap = *rng.pick(&[20, 60, 240]) * SEC;
        self.lease_min = *rng.pick(&[30, 60, 150]) * SEC;
        self.lease_max = self.lease_min * rng.between(1, 2);
        self.snapshot_entries = *rng.pick(&[20, 60, 200]);
        self.between = 0;
        self.pace = 10;
        self.election = 10 * SEC;
        self.gc_interval = 30 * SEC;
        self.drowsy = *rng.pick(&[100, 250, 500]) * MS;
        self.settle = 120 * SEC;
        self.calm = 60 * SEC;
        // A queue of clients that are gone passes a lock on, lease by lease.
        self.drain = (self.clients as u64 + 1) * (self.lease_max + 5 * SEC) + 120 * SEC;
    }

    /// Whether clocks keep the rate that clients rely on: exclusion of clients is not promised otherwise, but all that
    /// is measured in cluster time.
    #[must_use]
    pub fn keeps_rate(&self) -> bool {
        !self.has(Fault::WildClock)
    }

    /// A wait of a client, as long as the plan wants it.
    #[must_use]
    pub fn paced(&self, wait: Span) -> Span {
        Span(wait.0 * self.pace)
    }

    /// Whether a cluster may begin again.
    #[must_use]
    pub fn begins_anew(&self) -> bool {
        self.has(Fault::Restore) || self.has(Fault::ForceNew)
    }

    /// Whether members are exchanged while one of them is away.
    #[must_use]
    pub fn exchanges(&self) -> bool {
        self.has(Fault::Exchange) && self.voters == 3 && !self.witness && !self.begins_anew()
    }

    /// Whether the seed has this fault.
    #[must_use]
    pub fn has(&self, fault: Fault) -> bool {
        self.faults.contains(&fault)
    }
}
