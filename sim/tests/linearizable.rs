//! The search for an order finds one where there is one, and none where there is none: histories made by hand, and
//! random ones against trying every order.

use dflockd_sim::models::{
    Counter, CounterOp, Entry, EntryOp, Expected, List, ListOp, Lock, LockOp, Written,
};
use dflockd_sim::rng::Rng;
use dflockd_sim::search::{Call, Model, Verdict, search};

fn call<O>(begin: u64, end: u64, op: O) -> Call<O> {
    Call { begin, end: Some(end), op }
}

/// Nobody knows what came of it.
fn open<O>(begin: u64, op: O) -> Call<O> {
    Call { begin, end: None, op }
}

#[track_caller]
fn check<M: Model>(model: &M, initial: M::State, calls: &[Call<M::Op>], good: bool) {
    let verdict = search(model, &initial, calls, 10_000);
    assert_eq!(verdict == Verdict::Linearizable, good, "{verdict:?}");
    assert_ne!(verdict, Verdict::Unknown);
}

#[track_caller]
fn counter(calls: &[Call<CounterOp>], good: bool) {
    check(&Counter, 0, calls, good);
}

#[test]
fn stale_reads() {
    use CounterOp::{Add, Read, Set};
    counter(&[call(1, 4, Set(7)), call(2, 3, Read(0)), call(5, 6, Read(7))], true);
    counter(&[call(1, 2, Set(7)), call(3, 4, Read(0))], false);
    // Two reads, one after the other, can not go back.
    counter(&[call(1, 9, Set(7)), call(2, 3, Read(7)), call(4, 5, Read(0))], false);
    // What nobody was told of may have happened, then or later, once.
    counter(&[open(1, Add(None)), call(2, 3, Read(0)), call(4, 5, Read(1))], true);
    counter(&[open(1, Add(None)), call(2, 3, Read(1)), call(4, 5, Read(0))], false);
    counter(&[open(1, Add(None)), call(2, 3, Read(2))], false);
    counter(&[open(4, Add(None)), call(2, 3, Read(1))], false);
}

#[test]
fn lost_increments() {
    use CounterOp::Add;
    counter(&[call(1, 5, Add(Some(2))), call(2, 4, Add(Some(1)))], true);
    counter(&[call(1, 5, Add(Some(1))), call(2, 4, Add(Some(1)))], false);
    counter(&[call(1, 2, Add(Some(2))), call(3, 4, Add(Some(1)))], false);
    let many = (0..900).map(|n| call(n, n + 20, Add(Some(i64::try_from(n).unwrap() + 1))));
    counter(&many.collect::<Vec<_>>(), true);
}

#[test]
fn entries() {
    let write = |expected, value: &str, written| EntryOp::Write(expected, value.into(), written);
    let read = |value: &str| EntryOp::Read(Some(value.into()));
    let set = |value, revision| write(Expected::Any, value, Written::At(revision));
    let swap = |revision, value, written| write(Expected::Revision(revision), value, written);
    let good = [
        call(1, 2, set("a", 5)),
        call(3, 6, swap(5, "b", Written::At(6))),
        call(3, 6, swap(5, "c", Written::Conflict)),
        call(7, 8, read("b")),
        open(9, EntryOp::Delete),
        call(10, 11, write(Expected::Absent, "d", Written::At(9))),
    ];
    check(&Entry, None, &good, true);
    // Two that both found what they expected.
    let bad = [
        call(1, 2, set("a", 5)),
        call(3, 6, swap(5, "b", Written::At(6))),
        call(3, 6, swap(5, "c", Written::At(7))),
    ];
    check(&Entry, None, &bad, false);
    let bad = [call(1, 2, set("a", 5)), call(3, 4, set("b", 6)), call(5, 6, read("a"))];
    check(&Entry, None, &bad, false);
    // A write that nobody was told of is seen, and then it can not be gone without another.
    let lost = [
        open(1, write(Expected::Any, "a", Written::Unknown)),
        call(2, 3, read("a")),
        call(4, 5, EntryOp::Read(None)),
    ];
    check(&Entry, None, &lost, false);
}

#[test]
fn lists() {
    let push = |item: &str, length| ListOp::Push { left: false, item: item.into(), length };
    let pop = |waits, item: Option<&str>| ListOp::Pop {
        left: true,
        waits,
        item: Some(item.map(Into::into)),
    };
    let unknown = || ListOp::Pop { left: true, waits: false, item: None };
    let list = |calls: &[Call<ListOp>], good| check(&List, (Vec::new(), false), calls, good);
    let both = [call(1, 2, push("a", Some(1))), call(3, 4, push("b", Some(2)))];
    let with = |more: Vec<Call<ListOp>>| [&both[..], &more].concat();
    list(&with(vec![call(5, 6, pop(false, Some("a"))), call(7, 8, ListOp::Length(1))]), true);
    // One element twice, the wrong one, one that is lost.
    let twice = vec![call(5, 8, pop(false, Some("a"))), call(5, 8, pop(true, Some("a")))];
    list(&with(twice), false);
    list(&with(vec![call(5, 6, pop(false, Some("b")))]), false);
    list(&with(vec![call(5, 6, pop(false, None))]), false);
    list(&with(vec![open(5, unknown()), call(7, 8, pop(false, Some("b")))]), true);
    // Handed to somebody who waits: it was never in the list.
    let waits = call(1, 4, pop(true, Some("a")));
    list(&[waits.clone(), call(2, 3, push("a", Some(0))), call(5, 6, ListOp::Length(0))], true);
    list(&[call(2, 3, push("a", Some(0))), call(5, 6, ListOp::Length(0))], false);
    list(&[waits, call(2, 3, push("a", Some(0))), call(5, 6, ListOp::Length(1))], false);
}

#[test]
fn locks() {
    use LockOp::{Claim, Grant, Release, Renew};
    let lock = |slots, ends: &[(u64, u64)], calls: &[Call<LockOp>], good| {
        let lock = Lock { slots, ends: ends.iter().copied().collect() };
        check(&lock, (Vec::new(), 0), calls, good);
    };
    let mutex = |ends: &[(u64, u64)], calls: &[Call<LockOp>], good| {
        lock(Some(1), ends, calls, good);
    };
    let in_turn = [
        call(1, 2, Grant(1, false)),
        call(3, 6, Release(1, true)),
        call(4, 7, Grant(2, false)),
        call(8, 9, Renew(1, false)),
        call(8, 9, Renew(2, true)),
    ];
    mutex(&[], &in_turn, true);
    // Two holders; and one whose hold can have ended by itself in between, or only later.
    let two = [call(1, 2, Grant(1, false)), call(3, 4, Grant(2, false))];
    mutex(&[], &two, false);
    mutex(&[(1, 2)], &two, true);
    mutex(&[(1, 5)], &two, false);
    // Whose hold has ended can not renew it, and whose hold has not ended can.
    mutex(&[(1, 2)], &[&two[..], &[call(5, 6, Renew(1, true))]].concat(), false);
    mutex(&[(1, 2)], &[&two[..], &[call(5, 6, Release(1, false))]].concat(), true);
    mutex(&[(1, 9)], &[call(1, 2, Grant(1, false)), call(5, 6, Renew(1, false))], false);
    mutex(&[(1, 6)], &[call(1, 2, Grant(1, false)), call(5, 6, Renew(1, false))], true);
    // Fences grow; those of places that are claimed later are older.
    let late = |op| [call(1, 2, Grant(2, false)), call(3, 4, Release(2, true)), op];
    mutex(&[], &late(call(5, 6, Grant(1, false))), false);
    mutex(&[], &late(call(5, 6, Claim(1, false))), true);
    // A semaphore has room for as many as it says, a read-write lock for readers or a writer.
    let three = [1, 2, 3].map(|fence| call(fence, fence + 3, Grant(fence, false)));
    lock(Some(3), &[], &three, true);
    lock(Some(2), &[], &three, false);
    lock(None, &[], &three, true);
    let writer = [&three[..], &[call(5, 9, Grant(4, true))]].concat();
    lock(None, &[], &writer, false);
    lock(None, &[(1, 5), (3, 5)], &writer, false);
    lock(None, &[(1, 5), (2, 5), (3, 5)], &writer, true);
    let reader = [call(1, 2, Grant(1, true)), call(3, 4, Grant(2, false))];
    lock(None, &[], &reader, false);
    lock(None, &[(1, 3)], &reader, true);
    // Either of two may have ended, but not the one that is still there.
    let third = |fence| [&three[..], &[call(9, 10, Renew(fence, true))]].concat();
    lock(Some(2), &[(1, 2), (2, 3)], &third(1), true);
    lock(Some(2), &[(1, 2), (2, 3)], &third(2), true);
    lock(Some(2), &[(1, 2)], &third(1), false);
}

#[test]
fn too_many_steps_are_no_verdict() {
    let calls: Vec<_> = (0..20).map(|_| call(1, 9, CounterOp::Add(Some(1)))).collect();
    assert_eq!(search(&Counter, &0, &calls, 10), Verdict::Unknown);
}

/// Every order of every choice of calls, one after the other.
fn any_order<M: Model>(model: &M, state: &M::State, left: &[Call<M::Op>]) -> bool
where
    M::Op: Clone,
{
    if left.iter().all(|call| call.end.is_none()) {
        return true;
    }
    (0..left.len()).any(|next| {
        let mut rest = left.to_vec();
        let it = rest.remove(next);
        let in_time = rest.iter().all(|other| other.end.is_none_or(|end| it.begin <= end));
        in_time && model.step(state, &it.op, 0).iter().any(|after| any_order(model, after, &rest))
    })
}

fn compare<M: Model>(model: &M, initial: &M::State, op: impl Fn(&mut Rng, bool) -> M::Op)
where
    M::Op: Clone + std::fmt::Debug,
{
    let mut found = [0; 2];
    for seed in 0..4000 {
        let rng = &mut Rng::new(seed, 1);
        let mut calls = Vec::new();
        for _ in 0..=rng.index(7) {
            let begin = rng.below(12);
            let end = (!rng.chance(350)).then(|| begin + rng.below(8));
            calls.push(Call { begin, end, op: op(rng, end.is_some()) });
        }
        let expected = any_order(model, initial, &calls);
        let verdict = search(model, initial, &calls, 100_000);
        assert_eq!(verdict == Verdict::Linearizable, expected, "seed {seed}: {calls:?}");
        found[usize::from(expected)] += 1;
    }
    assert!(found.iter().all(|&count| count > 500), "{found:?}");
}

#[test]
fn the_search_agrees_with_trying_everything() {
    let small = |rng: &mut Rng| rng.below(3);
    let number = |rng: &mut Rng| i64::try_from(rng.below(3)).unwrap();
    compare(&Counter, &0, |rng, told| match rng.below(3) {
        0 => CounterOp::Add(told.then(|| number(rng))),
        1 => CounterOp::Set(number(rng)),
        _ => CounterOp::Read(number(rng)),
    });
    compare(&Entry, &None, |rng, told| {
        let expected = match rng.below(4) {
            0 => Expected::Absent,
            1 => Expected::Revision(small(rng)),
            _ => Expected::Any,
        };
        let written = match rng.below(3) {
            _ if !told => Written::Unknown,
            0 if expected != Expected::Any => Written::Conflict,
            _ => Written::At(small(rng)),
        };
        match rng.below(4) {
            0 => EntryOp::Delete,
            1 => EntryOp::Read(rng.chance(700).then(|| vec![b'a'])),
            _ => EntryOp::Write(expected, vec![b'a' + u8::from(rng.chance(300))], written),
        }
    });
    compare(&List, &(Vec::new(), false), |rng, told| {
        let (left, item) = (rng.chance(500), vec![b'a' + u8::from(rng.chance(300))]);
        match rng.below(5) {
            0 => ListOp::Length(number(rng)),
            1 | 2 => ListOp::Push { left, item, length: told.then(|| number(rng)) },
            _ => {
                let item = told.then(|| rng.chance(700).then_some(item));
                ListOp::Pop { left, waits: rng.chance(500), item }
            }
        }
    });
}
