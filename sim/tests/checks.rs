//! Checks of the simulator against entries made by hand: what each finds, and what it must not take for a mistake.

use dflockd_core::{End, Fence, Outcome, RequestId, SessionId};
use dflockd_sim::invariants::kept_answers::KeptAnswers;
use dflockd_sim::invariants::{Broken, fifo};
use dflockd_sim::oracle::{LockNow, LocksNow, Step, Touched};

/// A place in a queue: session, since when, writer.
type Place = (SessionId, u64, bool);

fn place(session: u64, since: u64) -> Place {
    (SessionId(session), since, false)
}

/// A mutex that a session holds, with a fence, and that others wait for.
fn mutex((holder, fence): (u64, u64), queue: &[Place]) -> LocksNow {
    let holders = vec![(SessionId(holder), Fence(fence), false)];
    let lock = LockNow { slots: Some(1), holders, queue: queue.to_vec() };
    LocksNow::from([((0, b"k".to_vec()), lock)])
}

/// What the check of queues says about an entry of this instant.
fn in_order(now: u64, before: &LocksNow, after: &LocksNow) -> Result<(), Broken> {
    let touched = Touched::default();
    fifo::check(&Step { index: 1, now, touched: &touched, before, after })
}

#[test]
fn who_overtakes_is_found() {
    let before = mutex((1, 1), &[place(2, 10), place(3, 20)]);
    in_order(30, &before, &mutex((2, 2), &[place(3, 20)])).unwrap();
    in_order(30, &before, &mutex((2, 2), &[place(3, 20), place(2, 30)])).unwrap();
    in_order(30, &before, &mutex((3, 2), &[place(2, 10)])).unwrap_err();
    in_order(30, &before, &mutex((4, 2), &[place(2, 10), place(3, 20)])).unwrap_err();
    in_order(30, &before, &mutex((1, 1), &[place(3, 20), place(2, 10)])).unwrap_err();
}

/// Seed 206277 of 2026-11-18: a session waited since an entry of the same instant, was granted, and waits again.
#[test]
fn a_place_of_the_same_instant_may_be_another_one() {
    let before = mutex((1, 1), &[place(2, 30)]);
    in_order(30, &before, &mutex((2, 2), &[place(2, 30)])).unwrap();
    // It gave its place up and came again.
    let before = mutex((1, 1), &[place(2, 30), place(3, 30)]);
    in_order(30, &before, &mutex((1, 1), &[place(3, 30), place(2, 30)])).unwrap();
    // Later there is no doubt, and nobody overtakes those who were there before.
    in_order(31, &before, &mutex((1, 1), &[place(3, 30), place(2, 30)])).unwrap_err();
    let before = mutex((1, 1), &[place(4, 20), place(2, 30)]);
    in_order(30, &before, &mutex((2, 2), &[place(4, 20), place(2, 30)])).unwrap_err();
}

fn popped() -> Outcome {
    Outcome::Popped { key: b"q".as_slice().into(), end: End::Left, value: b"v".as_slice().into() }
}

fn take_back(kept: &mut KeptAnswers, undone: Vec<Outcome>) -> Result<(), Broken> {
    let (touched, locks) = (Touched { undone, ..Touched::default() }, LocksNow::new());
    kept.check(&Step { index: 1, now: 0, touched: &touched, before: &locks, after: &locks })
}

#[test]
fn a_kept_answer_is_not_taken_back() {
    let mut kept = KeptAnswers::default();
    kept.answer(SessionId(1), RequestId(1), &popped());
    take_back(&mut kept, vec![]).unwrap();
    take_back(&mut kept, vec![popped()]).unwrap_err();
    kept.end(SessionId(1));
    take_back(&mut kept, vec![popped()]).unwrap();
}

/// Seed 367 of 2026-11-18: the item came back from a client without a kept session, and went to one with.
#[test]
fn what_is_taken_back_can_be_given_anew_in_the_same_entry() {
    let mut kept = KeptAnswers::default();
    kept.answer(SessionId(2), RequestId(1), &popped());
    take_back(&mut kept, vec![popped()]).unwrap();
    take_back(&mut kept, vec![popped()]).unwrap_err();
}
