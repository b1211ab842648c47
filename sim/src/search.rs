//! Whether concurrent calls could have happened one after the other, each at an instant between its begin and its end:
//! the search of Wing and Gong, which remembers where it has been as Lowe's does.
//!
//! It knows nothing of clusters and logs, which is the point: `invariants/answers.rs` asks the committed log, this asks
//! only what clients saw. The bound is a number of steps and not a time, so that a seed has one verdict.

use std::collections::BTreeSet;

use crate::rng::Rng;

/// What is called, as a sequential thing.
pub trait Model {
    /// All there is to know between two calls.
    type State: Clone + Ord;
    /// A call with its result.
    type Op: PartialEq;
    /// What a call can lead to; nothing if it can not have had this result now. It happens at `by` at the latest, which
    /// concerns those for whom time does something.
    fn step(&self, state: &Self::State, op: &Self::Op, by: u64) -> Vec<Self::State>;
}

/// One call.
#[derive(Clone, Debug)]
pub struct Call<O> {
    /// It did not happen before.
    pub begin: u64,
    /// It did not happen later. None: nobody knows, and it may never have happened.
    pub end: Option<u64>,
    /// What.
    pub op: O,
}

/// What a search came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// There is an order.
    Linearizable,
    /// There is none. The call that could not be placed when most others were.
    Impossible(usize),
    /// It took too many steps.
    Unknown,
}

struct Node<S> {
    /// The call that led here.
    via: Option<usize>,
    /// What can come next, the best last.
    choices: Vec<Choice<S>>,
}

struct Choice<S> {
    call: usize,
    after: S,
    /// The state before, if nobody knows of the call.
    hidden: Option<S>,
}

struct Search<'a, M: Model> {
    model: &'a M,
    calls: &'a [Call<M::Op>],
    /// Calls that have ended, by their begin.
    ended: Vec<usize>,
    /// And those that nobody knows of.
    open: Vec<usize>,
    done: Vec<bool>,
    /// How many of `ended` from the front are done.
    low: usize,
}

/// Looks for an order of the calls, in at most so many steps.
pub fn search<M: Model>(
    model: &M,
    initial: &M::State,
    calls: &[Call<M::Op>],
    steps_max: usize,
) -> Verdict {
    let mut order: Vec<usize> = (0..calls.len()).collect();
    order.sort_by_key(|&call| calls[call].begin);
    let (ended, open): (Vec<_>, Vec<_>) =
        order.into_iter().partition(|&call| calls[call].end.is_some());
    let mut left = ended.len();
    let mut best = (left, ended.first().copied().unwrap_or(0));
    let mut search = Search { model, calls, ended, open, done: vec![false; calls.len()], low: 0 };
    if left == 0 {
        return Verdict::Linearizable;
    }
    // The set of calls that are done is the sum of a random number for each: two sets have the same by chance only.
    let mut rng = Rng::new(calls.len() as u64, 8);
    let names: Vec<u128> =
        calls.iter().map(|_| u128::from(rng.bits()) << 64 | u128::from(rng.bits())).collect();
    let mut name = 0_u128;
    let mut seen = BTreeSet::new();
    let mut stack = vec![Node { via: None, choices: search.choices(initial, None) }];
    let mut steps = 0;
    while let Some(node) = stack.last_mut() {
        let Some(Choice { call, after, hidden }) = node.choices.pop() else {
            if let Some(call) = node.via {
                search.done[call] = false;
                name = name.wrapping_sub(names[call]);
                left += usize::from(calls[call].end.is_some());
            }
            search.low = 0;
            stack.pop();
            continue;
        };
        steps += 1;
        if steps > steps_max {
            return Verdict::Unknown;
        }
        let named = name.wrapping_add(names[call]);
        if !seen.insert((named, after.clone(), hidden.clone())) {
            continue;
        }
        search.done[call] = true;
        name = named;
        left -= usize::from(calls[call].end.is_some());
        if left == 0 {
            return Verdict::Linearizable;
        }
        let choices = search.choices(&after, hidden.as_ref());
        if left < best.0 {
            best = (left, search.ended[search.low]);
        }
        stack.push(Node { via: Some(call), choices });
    }
    Verdict::Impossible(best.1)
}

impl<M: Model> Search<'_, M> {
    /// The calls that can come next, the best last: of those that have ended the one that ended first.
    ///
    /// A call that nobody knows of is tried only right before one that it makes possible, or else it could as well come
    /// later. `hidden` is the state before it, if the last one was such a call.
    fn choices(&mut self, state: &M::State, hidden: Option<&M::State>) -> Vec<Choice<M::State>> {
        while self.ended.get(self.low).is_some_and(|&call| self.done[call]) {
            self.low += 1;
        }
        let mut by = u64::MAX;
        let mut next = Vec::new();
        for &call in &self.ended[self.low..] {
            let Call { begin, end, .. } = self.calls[call];
            if begin > by {
                break;
            }
            if !self.done[call] {
                by = by.min(end.unwrap_or(u64::MAX));
                next.push(call);
            }
        }
        next.retain(|&call| self.calls[call].begin <= by);
        next.sort_by_key(|&call| std::cmp::Reverse(self.calls[call].end));
        let mut choices = Vec::new();
        let mut tried: Vec<&M::Op> = Vec::new();
        for &call in &self.open {
            let Call { begin, ref op, .. } = self.calls[call];
            if begin > by {
                break;
            }
            // Of calls that do the same, the one that began first does for all.
            if self.done[call] || tried.contains(&op) {
                continue;
            }
            let afters = self.model.step(state, op, by);
            if hidden.is_some_and(|before| self.model.step(before, op, by) == afters) {
                continue;
            }
            let changed = afters.into_iter().filter(|after| after != state);
            let before = choices.len();
            let hidden = || Some(state.clone());
            choices.extend(changed.map(|after| Choice { call, after, hidden: hidden() }));
            if choices.len() > before {
                tried.push(op);
            }
        }
        for call in next {
            let op = &self.calls[call].op;
            if hidden.is_some_and(|before| !self.model.step(before, op, by).is_empty()) {
                continue;
            }
            let afters = self.model.step(state, op, by).into_iter();
            choices.extend(afters.map(|after| Choice { call, after, hidden: None }));
        }
        choices
    }
}
