//! The OpenAPI document: what the routes say of themselves, and what holds for all of them.

use bytes::Bytes;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{Components, InfoBuilder, OpenApi};

use super::body;
use super::openapi_parts::refusal;

/// Refusals that every route can give because of what stands before it, with their codes.
const EVERYWHERE: [(&str, &str); 3] =
    [("401", "`unauthorized`"), ("429", "`rate_limited`"), ("503", "`draining`, `not_leader`")];
/// What is not for everybody: refusals of identities without the right to it, and where there is no token of requests
/// that the page of somebody else may have made.
const NOT_PUBLIC: [(&str, &str); 2] =
    [("403", "`forbidden`, `origin_not_allowed`"), ("421", "`host_not_allowed`")];
/// A refusal of requests that may have a body.
const OF_BODIES: (&str, &str) = ("415", "`unsupported_media_type`");
/// What is told whoever asks, by whatever name.
const PUBLIC: [&str; 2] = ["/metrics", "/v1/openapi.json"];
/// Routes that are answered whatever happens.
const PROBES: [&str; 2] = ["/health", "/ready"];

/// The text of the document.
pub(crate) fn text(mut document: OpenApi) -> Bytes {
    document.info = InfoBuilder::new()
        .title("dflockd")
        .version(env!("CARGO_PKG_VERSION"))
        .description(Some(
            "Locks, semaphores, read-write locks, elections, values and signals over JSON. Fences, revisions and \
             other 64-bit numbers are strings.",
        ))
        .build();
    let components = document.components.get_or_insert_with(Components::new);
    let bearer = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build();
    components.add_security_scheme("bearer", SecurityScheme::Http(bearer));
    // Without a token configured, nobody needs one.
    let nothing = SecurityRequirement::default();
    document.security = Some(vec![nothing, SecurityRequirement::new("bearer", [""; 0])]);
    for (path, item) in &mut document.paths.paths {
        if PROBES.contains(&path.as_str()) {
            continue;
        }
        let operations = [
            (false, &mut item.get),
            (false, &mut item.head),
            (true, &mut item.put),
            (true, &mut item.post),
            (true, &mut item.delete),
            (true, &mut item.patch),
        ];
        for (may_have_body, operation) in operations {
            let Some(operation) = operation else { continue };
            let own = if PUBLIC.contains(&path.as_str()) { &[][..] } else { &NOT_PUBLIC };
            let body = Some(&OF_BODIES).filter(|_| may_have_body);
            for &(status, codes) in EVERYWHERE.iter().chain(own).chain(body) {
                let responses = &mut operation.responses.responses;
                responses.entry(status.to_owned()).or_insert_with(|| refusal(codes));
            }
        }
    }
    body::json_line(&document).into()
}
