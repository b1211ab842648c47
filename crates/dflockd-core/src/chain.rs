//! An arena with small ids, and chains through its entries: a queue from whose middle an entry leaves
//! without a scan.

use core::ops::{Index, IndexMut};

use slab::Slab;

/// The place of an entry in its [`Arena`].
pub(crate) type Slot = u32;

const NONE: Slot = Slot::MAX;

pub(crate) struct Arena<T>(Slab<T>);

impl<T> Arena<T> {
    pub(crate) const fn new() -> Self {
        Self(Slab::new())
    }

    pub(crate) fn reserve(&mut self, count: usize) {
        self.0.reserve_exact(count);
    }

    pub(crate) fn insert(&mut self, entry: T) -> Slot {
        if self.0.len() == self.0.capacity() {
            // A quarter at a time: doubling would leave up to half of the memory unused.
            self.0.reserve_exact((self.0.len() / 4).max(4));
        }
        let slot = Slot::try_from(self.0.insert(entry)).expect("fewer than 2^32 entries");
        assert!(slot != NONE, "arena is full");
        slot
    }

    pub(crate) fn remove(&mut self, slot: Slot) -> T {
        self.0.remove(slot as usize)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The entry at a place, if there is one.
    pub(crate) fn get(&self, slot: usize) -> Option<&T> {
        self.0.get(slot)
    }

    /// Above every place that is taken.
    pub(crate) fn end(&self) -> usize {
        self.0.capacity()
    }

    /// All entries, in no order that means anything.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Slot, &T)> {
        self.0
            .iter()
            .map(|(slot, entry)| (Slot::try_from(slot).expect("inserted as a slot"), entry))
    }
}

impl<T> Index<Slot> for Arena<T> {
    type Output = T;

    fn index(&self, slot: Slot) -> &T {
        &self.0[slot as usize]
    }
}

impl<T> IndexMut<Slot> for Arena<T> {
    fn index_mut(&mut self, slot: Slot) -> &mut T {
        &mut self.0[slot as usize]
    }
}

/// The neighbours of an entry in one chain.
#[derive(Clone, Copy)]
pub(crate) struct Links {
    previous: Slot,
    next: Slot,
}

impl Links {
    pub(crate) const NONE: Self = Self { previous: NONE, next: NONE };
}

/// An entry that can be part of chain number `N`.
pub(crate) trait Linked<const N: usize> {
    fn links(&self) -> &Links;
    fn links_mut(&mut self) -> &mut Links;
}

/// A doubly linked list through the entries of an arena.
#[derive(Clone, Copy)]
pub(crate) struct Chain<const N: usize> {
    head: Slot,
    tail: Slot,
    len: u32,
}

impl<const N: usize> Chain<N> {
    pub(crate) const fn new() -> Self {
        Self { head: NONE, tail: NONE, len: 0 }
    }

    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn first(&self) -> Option<Slot> {
        (self.head != NONE).then_some(self.head)
    }

    pub(crate) fn push_back<T: Linked<N>>(&mut self, arena: &mut Arena<T>, slot: Slot) {
        *arena[slot].links_mut() = Links { previous: self.tail, next: NONE };
        if self.tail == NONE {
            self.head = slot;
        } else {
            arena[self.tail].links_mut().next = slot;
        }
        self.tail = slot;
        self.len += 1;
    }

    /// Puts an entry behind the last one that goes before it, which is looked for from the end.
    pub(crate) fn insert_by<T: Linked<N>>(
        &mut self,
        arena: &mut Arena<T>,
        slot: Slot,
        goes_before: impl Fn(&T) -> bool,
    ) {
        let mut previous = self.tail;
        while previous != NONE && !goes_before(&arena[previous]) {
            previous = arena[previous].links().previous;
        }
        let next = if previous == NONE { self.head } else { arena[previous].links().next };
        *arena[slot].links_mut() = Links { previous, next };
        if previous == NONE {
            self.head = slot;
        } else {
            arena[previous].links_mut().next = slot;
        }
        if next == NONE {
            self.tail = slot;
        } else {
            arena[next].links_mut().previous = slot;
        }
        self.len += 1;
    }

    pub(crate) fn remove<T: Linked<N>>(&mut self, arena: &mut Arena<T>, slot: Slot) {
        let Links { previous, next } = *arena[slot].links();
        if previous == NONE {
            assert!(self.head == slot, "entry {slot} is not in this chain");
            self.head = next;
        } else {
            arena[previous].links_mut().next = next;
        }
        if next == NONE {
            self.tail = previous;
        } else {
            arena[next].links_mut().previous = previous;
        }
        *arena[slot].links_mut() = Links::NONE;
        self.len -= 1;
    }

    pub(crate) fn iter<'a, T: Linked<N>>(
        &self,
        arena: &'a Arena<T>,
    ) -> impl Iterator<Item = (Slot, &'a T)> + use<'a, N, T> {
        let mut next = self.head;
        core::iter::from_fn(move || {
            if next == NONE {
                return None;
            }
            let slot = next;
            let entry = &arena[slot];
            next = entry.links().next;
            Some((slot, entry))
        })
    }
}
