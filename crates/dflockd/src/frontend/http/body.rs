//! What comes in with a request, checked, and JSON out.
//!
//! Each extractor refuses with a 400 that says why. The order of a handler's arguments is the order of the checks:
//! [`Key`], then the session, then the body.

use std::ops::Deref;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{FromRequest, FromRequestParts, MatchedPath, OptionalFromRequest, Request};
use axum::http::header::CONTENT_TYPE;
use axum::http::request::Parts;
use axum::http::{HeaderValue, StatusCode};
use axum::response::Response;
use dflockd_core::check;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::error::Category;

use super::Shared;
use super::error::ApiError;

/// The largest body of a request.
const BODY_BYTES_MAX: usize = 1 << 20;
/// The longest text of the parser that is passed on.
const DETAIL_BYTES_MAX: usize = 400;

/// A JSON body: one value and nothing after it. `Option<Json<T>>` also takes an empty body and `null`.
pub(crate) struct Json<T>(pub(crate) T);

impl<T: DeserializeOwned> FromRequest<Shared> for Json<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Shared) -> Result<Self, ApiError> {
        let bytes = read(request, app.read_timeout).await?;
        if bytes.is_empty() {
            return Err(ApiError::bad_request("a JSON body is required"));
        }
        parse(&bytes)
    }
}

impl<T: DeserializeOwned> OptionalFromRequest<Shared> for Json<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Shared) -> Result<Option<Self>, ApiError> {
        let bytes = read(request, app.read_timeout).await?;
        if bytes.is_empty() || bytes.trim_ascii() == b"null" {
            return Ok(None);
        }
        parse(&bytes).map(Some)
    }
}

async fn read(request: Request, limit: Duration) -> Result<Bytes, ApiError> {
    let body = Limited::new(request.into_body(), BODY_BYTES_MAX).collect();
    // Nearly always the whole body is there already, and no timer is needed.
    tokio::pin!(body);
    let collected = tokio::select! {
        biased;
        collected = &mut body => collected,
        () = tokio::time::sleep(limit) => {
            return Err(ApiError::bad_request("the body did not arrive in time"));
        }
    };
    match collected {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => {
            Err(ApiError::bad_request("the body is longer than 1 MiB"))
        }
        Err(_) => Err(ApiError::bad_request("the body could not be read")),
    }
}

pub(crate) fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<Json<T>, ApiError> {
    // An array would be taken for the members in their order.
    if !bytes.trim_ascii_start().starts_with(b"{") {
        return Err(ApiError::bad_request("the body is no JSON object"));
    }
    match serde_json::from_slice(bytes) {
        Ok(value) => Ok(Json(value)),
        Err(error) => Err(ApiError::bad_request(explain(&error))),
    }
}

/// What is wrong with a body. Names of members are told, what is in them may be a secret.
fn explain(error: &serde_json::Error) -> String {
    let (line, column) = (error.line(), error.column());
    let text = error.to_string();
    let about_names = ["unknown field", "missing field", "duplicate field", "unknown variant"];
    if about_names.iter().any(|known| text.starts_with(known)) && text.len() <= DETAIL_BYTES_MAX {
        return text;
    }
    let kind = match error.classify() {
        Category::Data => "does not have the form that is asked for",
        Category::Eof => "ends too early",
        Category::Syntax | Category::Io => "is no JSON",
    };
    format!("the body {kind} (line {line}, column {column})")
}

/// The query of a request.
pub(crate) struct Query<T>(pub(crate) T);

impl<T: DeserializeOwned> FromRequestParts<Shared> for Query<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &Shared) -> Result<Self, ApiError> {
        match axum::extract::Query::<T>::try_from_uri(&parts.uri) {
            Ok(query) => Ok(Self(query.0)),
            Err(error) => Err(ApiError::bad_request(error.body_text())),
        }
    }
}

/// The `{key}` of the path: 1-256 bytes without space, TAB, CR and LF.
#[derive(Clone, Debug)]
pub(crate) struct Key(pub(crate) Vec<u8>);

impl Deref for Key {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl FromRequestParts<Shared> for Key {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &Shared) -> Result<Self, ApiError> {
        segment(parts, "{key}").and_then(key)
    }
}

/// A key, as it stands in the path after decoding.
pub(crate) fn key(key: Vec<u8>) -> Result<Key, ApiError> {
    check::key(&key)?;
    Ok(Key(key))
}

/// What stands in the path where the route's template has `name`, percent-decoded. A segment may be any bytes.
pub(crate) fn segment(parts: &Parts, name: &str) -> Result<Vec<u8>, ApiError> {
    let template = parts.extensions.get::<MatchedPath>().ok_or_else(ApiError::internal)?;
    let mut pairs = template.as_str().split('/').zip(parts.uri.path().split('/'));
    let (_, raw) = pairs.find(|(part, _)| *part == name).ok_or_else(ApiError::internal)?;
    decode(raw).ok_or_else(|| ApiError::bad_request("malformed percent-encoding in the path"))
}

pub(crate) fn decode(raw: &str) -> Option<Vec<u8>> {
    let mut decoded = Vec::with_capacity(raw.len());
    let mut bytes = raw.bytes();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            decoded.push(byte);
            continue;
        }
        let high = char::from(bytes.next()?).to_digit(16)?;
        let low = char::from(bytes.next()?).to_digit(16)?;
        decoded.push(u8::try_from(high * 16 + low).ok()?);
    }
    Some(decoded)
}

/// 200 with JSON and a line feed.
pub(crate) fn reply(value: &impl Serialize) -> Response {
    reply_with(StatusCode::OK, value)
}

/// A status with JSON and a line feed.
pub(crate) fn reply_with(status: StatusCode, value: &impl Serialize) -> Response {
    json_response(status, Body::from(json_line(value)))
}

/// JSON and a line feed, for bodies that are made elsewhere.
pub(crate) fn json_line(value: &impl Serialize) -> Vec<u8> {
    let mut text = Vec::with_capacity(128);
    serde_json::to_writer(&mut text, value).expect("plain data can be written");
    text.push(b'\n');
    text
}

/// A response whose body is JSON already.
pub(crate) fn json_response(status: StatusCode, body: Body) -> Response {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(CONTENT_TYPE, json);
    response
}

/// 204.
pub(crate) fn no_content() -> Response {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    response
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Sample {
        token: String,
    }

    fn detail(body: &str) -> String {
        match parse::<Sample>(body.as_bytes()) {
            Ok(Json(sample)) => format!("ok {}", sample.token),
            Err(error) => error.detail.unwrap_or_default().into_owned(),
        }
    }

    #[test]
    fn one_value_of_the_right_form() {
        assert_eq!(detail(r#" {"token":"t"} "#), "ok t");
        let unknown = "unknown field `tokens`, expected `token` at line 1 column 9";
        assert_eq!(detail(r#"{"tokens":"t"}"#), unknown);
        assert!(detail("{}").starts_with("missing field `token`"));
        assert!(detail(r#"{"token":"t"} {}"#).contains("is no JSON"));
        assert!(detail(r#"{"token":"t""#).contains("ends too early"));
        let deep = format!(r#"{{"token":{}"#, "[".repeat(100_000));
        assert!(detail(&deep).contains("the body"));
        assert_eq!(detail(r#"["t"]"#), "the body is no JSON object");
        // Whatever it is, a value is not shown.
        let wrong = detail(r#"["secret"]"#) + &detail(r#"{"token":5}"#) + &detail(r#""secret""#);
        assert!(!wrong.contains("secret") && !wrong.contains('5'), "{wrong}");
    }

    #[test]
    fn percent_encoding() {
        assert_eq!(decode("a%2Fb%00%ff+").unwrap(), b"a/b\0\xff+");
        for wrong in ["%", "%4", "%zz", "a%", "%+1"] {
            assert!(decode(wrong).is_none(), "{wrong}");
        }
    }
}
