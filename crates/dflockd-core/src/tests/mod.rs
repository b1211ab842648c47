//! Tests of the whole store: a naive twin of it, and random commands that both must answer alike.

mod model;
mod properties;
