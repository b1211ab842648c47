//! What many routes have in common in the OpenAPI document: parameters and refusals.

use std::collections::BTreeMap;

use utoipa::openapi::path::{Parameter, ParameterBuilder, ParameterIn};
use utoipa::openapi::schema::{ObjectBuilder, SchemaType, Type};
use utoipa::openapi::{ContentBuilder, Ref, RefOr, Required, Response, ResponseBuilder};
use utoipa::{IntoParams, IntoResponses, OpenApi};

use super::error::ErrorBody;

/// Schemas that are only referred to by what is below.
#[derive(OpenApi)]
#[openapi(components(schemas(ErrorBody)))]
pub(crate) struct Referred;

/// `{key}` of the path.
pub(crate) enum InKey {}

/// The header that names the session.
pub(crate) enum NeedsSession {}

/// The header that names the session, where the request decides whether a session is needed.
pub(crate) enum MayNeedSession {}

/// The header with the operator's token.
pub(crate) enum NeedsAdmin {}

fn parameter(
    name: &str,
    place: ParameterIn,
    what: &str,
    [min, max]: [usize; 2],
    form: &str,
) -> Parameter {
    let schema = ObjectBuilder::new()
        .schema_type(SchemaType::new(Type::String))
        .min_length(Some(min))
        .max_length(Some(max))
        .pattern(Some(form));
    ParameterBuilder::new()
        .name(name)
        .parameter_in(place)
        .required(Required::True)
        .description(Some(what))
        .schema(Some(schema))
        .build()
}

fn session() -> Parameter {
    let what = "The id of a session.";
    parameter("X-Dflockd-Session", ParameterIn::Header, what, [32, 32], "^[0-9a-f]{32}$")
}

impl IntoParams for InKey {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        let what = "1 to 256 bytes without white space, percent-encoded.";
        vec![parameter("key", ParameterIn::Path, what, [1, 256], r"^\S+$")]
    }
}

impl IntoParams for NeedsSession {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        vec![session()]
    }
}

impl IntoParams for MayNeedSession {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        let mut parameter = session();
        parameter.required = Required::False;
        vec![parameter]
    }
}

impl IntoParams for NeedsAdmin {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        let what = "The admin token, in addition to the bearer token.";
        vec![parameter("X-Dflockd-Admin", ParameterIn::Header, what, [1, 4096], r"^\S+$")]
    }
}

type Responses = BTreeMap<String, RefOr<Response>>;

/// A refusal, with the codes that it can have.
pub(super) fn refusal(codes: &str) -> RefOr<Response> {
    let error = ContentBuilder::new().schema(Some(Ref::from_schema_name("Error"))).build();
    RefOr::T(ResponseBuilder::new().description(codes).content("application/json", error).build())
}

/// Sets of refusals with names.
macro_rules! refusals {
    ($($(#[$doc:meta])* $name:ident { $($status:literal: $codes:literal),+ })+) => {$(
        $(#[$doc])*
        pub(crate) enum $name {}

        impl IntoResponses for $name {
            fn responses() -> Responses {
                Responses::from([$((stringify!($status).to_owned(), refusal($codes))),+])
            }
        }
    )+};
}

refusals! {
    /// What every route can answer.
    Refusals {
        400: "`bad_request`: the path, a header, the query or the body is not as described.",
        401: "`unauthorized`: the bearer token is missing or wrong.",
        429: "`rate_limited`: too many requests from this address.",
        500: "`internal`: a defect of the server.",
        503: "`draining`: the server is shutting down. `not_leader`: ask the member in `X-Dflockd-Leader`. \
            `unavailable`: it can not be decided now, and nothing was done. `unknown`: the request may have had its \
            effect. `max_locks`, `max_waiters`, `max_keys`, `max_holds`, `max_waits`, `max_sessions`, \
            `max_sessions_per_ip`, `max_subscriptions`: a limit is reached. \
            `fence_persistence`: no fence can be had now."
    }
    /// What every route of an operator can answer.
    AdminRefusals {
        400: "`bad_request`: the path, a header or the body is not as described. `add_voter_failed`, \
            `remove_voter_failed`: the cluster did not take the change; the detail says why.",
        401: "`unauthorized`, `admin_unauthorized`: a token is missing or wrong.",
        429: "`rate_limited`: too many requests from this address.",
        500: "`internal`: a defect of the server.",
        503: "`admin_disabled`: no admin token is configured. `draining`, `not_leader`, `unavailable`, `unknown`."
    }
    /// What the routes of a session itself can answer.
    OwnSession { 400: "`bad_request`", 410: "`session_gone`" }
    /// The session is over.
    SessionGone { 410: "`session_gone`: there is no such session, or it ended meanwhile." }
    /// No such hold.
    NotHeld { 404: "`not_held`: no such hold, or its lease has ended." }
    /// No such thing.
    NotFound { 404: "`not_found`" }
    /// Not a cluster.
    NoCluster { 404: "`cluster_disabled`: this server is no member of a cluster." }
    /// Of an acquire.
    AcquireConflict {
        409: "`type_mismatch`: the key is a lock of another kind. `limit_mismatch`: the semaphore has another limit. \
            `lease_expired`: the lease ran out before the grant could be told."
    }
    /// Of an enqueue.
    EnqueueConflict {
        409: "`already_enqueued`: the session has a place in this queue. `type_mismatch`, `limit_mismatch`."
    }
    /// Of a wait.
    WaitConflict {
        409: "`not_enqueued`: the session has no place in this queue. `lease_expired`: the place was granted and its \
            lease ran out before it was claimed. `already_waiting`."
    }
    /// Of a counter.
    CounterConflict { 409: "`overflow`: the counter would leave 64 bits." }
    /// Of a list.
    ListConflict { 409: "`list_full`: the list is full." }
    /// Of a barrier.
    BarrierConflict {
        409: "`barrier_count_mismatch`: others wait for another number. `already_waiting`: the session waits here."
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use dflockd_core::{REFUSALS, RefusalSpec};
    use utoipa::openapi::path::Operation;

    use super::super::{admin, inspection, locks, service_routes, session_routes, streams, values};

    const MANUAL: &str = include_str!("../../../../../docs/http.md");
    const ERRORS: &str = include_str!("error.rs");

    /// Every route of the server, as the document of the interface has it.
    fn routes() -> BTreeSet<String> {
        let routers = [
            session_routes::routes(),
            service_routes::routes(),
            locks::routes(),
            values::routes(),
            streams::routes(),
            inspection::routes(),
            admin::routes(),
        ];
        let mut routes = BTreeSet::new();
        for router in routers {
            for (path, item) in router.into_openapi().paths.paths {
                let methods: [(&str, &Option<Operation>); 4] = [
                    ("GET", &item.get),
                    ("PUT", &item.put),
                    ("POST", &item.post),
                    ("DELETE", &item.delete),
                ];
                let methods = methods.into_iter().filter(|(_, operation)| operation.is_some());
                routes.extend(methods.map(|(method, _)| format!("{method} {path}")));
            }
        }
        routes
    }

    /// What stands in the manual between backticks and passes.
    fn named(is_wanted: impl Fn(&str) -> bool) -> BTreeSet<String> {
        let lines = MANUAL.lines().flat_map(|line| line.split('`').skip(1).step_by(2));
        lines.filter(|text| is_wanted(text)).map(str::to_owned).collect()
    }

    #[test]
    fn the_manual_has_every_route() {
        let is_route = |text: &str| {
            let (method, path) = text.split_once(' ').unwrap_or_default();
            ["GET", "PUT", "POST", "DELETE"].contains(&method) && path.starts_with('/')
        };
        assert_eq!(named(is_route), routes());
    }

    #[test]
    fn the_manual_has_every_code() {
        let is_code = |text: &&str| {
            text.len() > 3 && text.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_')
        };
        let code = ERRORS.split("#[cfg(test)]").next().unwrap_or_default();
        let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
        let codes: Vec<_> =
            lines.flat_map(|line| line.split('"').skip(1).step_by(2)).filter(is_code).collect();
        assert!(codes.len() > 10, "{codes:?}");
        let told = named(|text| is_code(&text));
        for code in codes {
            assert!(told.contains(code), "{code} is not in docs/http.md");
        }
    }

    #[test]
    fn the_manual_has_every_refusal_of_the_core() {
        for (_, RefusalSpec { http_status, http_error, .. }) in REFUSALS {
            let (status, code) = (format!("| {http_status} | "), format!("`{http_error}`"));
            let mut rows = MANUAL.lines().filter(|line| line.starts_with(&status));
            assert!(rows.any(|row| row.contains(&code)), "{http_status} {http_error}");
        }
    }
}
