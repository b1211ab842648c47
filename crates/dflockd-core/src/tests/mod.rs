//! Tests of the whole store: a naive twin of it, and random commands that both must answer alike.

mod bounds;
mod model;
mod properties;
