//! The gRPC services only grow: what was committed once is still there, with the same numbers and types.
//!
//! ```text
//! DFLOCKD_BASELINE=1 cargo test -p dflockd-wire --features grpc --test baseline
//! ```
//!
//! takes the services as they are for the next comparison, if nothing is broken by them.
#![cfg(feature = "grpc")]

use std::collections::BTreeMap;
use std::path::Path;

use dflockd_wire::grpc::DESCRIPTORS;
use prost::Message;
use prost_types::{
    DescriptorProto, EnumDescriptorProto, FileDescriptorProto, FileDescriptorSet,
    ServiceDescriptorProto,
};

/// What of a set of files is promised: a name for each thing, and what must stay the same about it.
fn promises(set: &FileDescriptorSet) -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    for file in &set.file {
        let FileDescriptorProto { message_type, enum_type, service, .. } = file;
        let package = file.package().to_owned();
        for message in message_type {
            add_message(&package, message, &mut all);
        }
        for kind in enum_type {
            add_enum(&package, kind, &mut all);
        }
        for service in service {
            add_service(&package, service, &mut all);
        }
    }
    all
}

fn add_message(within: &str, message: &DescriptorProto, all: &mut BTreeMap<String, String>) {
    let name = format!("{within}.{}", message.name());
    all.insert(format!("message {name}"), String::new());
    for field in &message.field {
        let oneof =
            field.oneof_index.and_then(|at| message.oneof_decl.get(usize::try_from(at).ok()?));
        let facts = format!(
            "{} = {}, type {:?} {}, label {:?}, oneof {:?}, optional {}",
            field.name(),
            field.number(),
            field.r#type(),
            field.type_name(),
            field.label(),
            oneof.map(|oneof| oneof.name().to_owned()),
            field.proto3_optional(),
        );
        // By its number, which is what goes over the wire.
        all.insert(format!("field {} of {name}", field.number()), facts);
    }
    for nested in &message.nested_type {
        add_message(&name, nested, all);
    }
    for kind in &message.enum_type {
        add_enum(&name, kind, all);
    }
}

fn add_enum(within: &str, kind: &EnumDescriptorProto, all: &mut BTreeMap<String, String>) {
    let name = format!("{within}.{}", kind.name());
    for value in &kind.value {
        all.insert(format!("value {} of {name}", value.number()), value.name().to_owned());
    }
}

fn add_service(within: &str, service: &ServiceDescriptorProto, all: &mut BTreeMap<String, String>) {
    for method in &service.method {
        let facts = format!(
            "{} {} to {} {}",
            method.client_streaming(),
            method.input_type(),
            method.server_streaming(),
            method.output_type(),
        );
        all.insert(format!("method {within}.{}/{}", service.name(), method.name()), facts);
    }
}

/// What the new files break of what the old ones promised.
fn broken(old: &FileDescriptorSet, new: &FileDescriptorSet) -> Vec<String> {
    let (old, new) = (promises(old), promises(new));
    let mut broken = Vec::new();
    for (name, facts) in old {
        match new.get(&name) {
            Some(now) if *now == facts => {}
            Some(now) => broken.push(format!("{name} was {facts:?} and is {now:?}")),
            None => broken.push(format!("{name} is gone")),
        }
    }
    broken
}

#[test]
fn nothing_that_was_promised_is_broken() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("proto/baseline.binpb");
    let new = FileDescriptorSet::decode(DESCRIPTORS).expect("what the build made");
    if let Ok(bytes) = std::fs::read(&path) {
        let old = FileDescriptorSet::decode(&bytes[..]).expect("what was committed");
        assert_eq!(broken(&old, &new), Vec::<String>::new());
    } else {
        assert!(std::env::var_os("DFLOCKD_BASELINE").is_some(), "there is no {}", path.display());
    }
    if std::env::var_os("DFLOCKD_BASELINE").is_some() {
        std::fs::write(&path, DESCRIPTORS).expect("the folder is there");
    }
}

#[test]
fn what_breaks_is_noticed() {
    let old = FileDescriptorSet::decode(DESCRIPTORS).expect("what the build made");
    let with = |change: &dyn Fn(&mut FileDescriptorProto)| {
        let mut new = old.clone();
        let file = new.file.iter_mut().find(|file| file.name().ends_with("kv.proto"));
        change(file.expect("it is there"));
        broken(&old, &new)
    };
    let set = |file: &FileDescriptorProto| {
        file.message_type.iter().position(|it| it.name() == "SetRequest").expect("it is there")
    };
    assert_eq!(with(&|_| {}), Vec::<String>::new());
    let renumbered = with(&|file| {
        let at = set(file);
        file.message_type[at].field[4].number = Some(99);
    });
    assert_eq!(renumbered, ["field 5 of dflockd.v1.SetRequest is gone"]);
    let retyped = with(&|file| {
        let at = set(file);
        file.message_type[at].field[5].r#type = Some(5);
    });
    assert_eq!(retyped.len(), 1, "{retyped:?}");
    let renamed = with(&|file| {
        let at = set(file);
        file.message_type[at].field[4].name = Some("val".to_owned());
    });
    assert_eq!(renamed.len(), 1, "{renamed:?}");
    let removed = with(&|file| {
        file.service[0].method.pop();
    });
    assert_eq!(removed, ["method dflockd.v1.Kv/CompareAndSet is gone"]);
    let streamed = with(&|file| file.service[0].method[0].server_streaming = Some(true));
    assert_eq!(streamed.len(), 1, "{streamed:?}");
    // What is added breaks nothing.
    let added = with(&|file| {
        let at = set(file);
        let mut field = file.message_type[at].field[4].clone();
        (field.name, field.number) = (Some("more".to_owned()), Some(77));
        file.message_type[at].field.push(field);
    });
    assert_eq!(added, Vec::<String>::new());
}
