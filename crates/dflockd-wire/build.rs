//! Makes the gRPC code from the `.proto` files, without protoc, if it is wanted.

#[cfg(not(feature = "grpc"))]
fn main() {
    println!("cargo::rerun-if-changed=build.rs");
}

#[cfg(feature = "grpc")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = std::path::Path::new("proto");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=proto/dflockd");
    let mut files: Vec<_> = std::fs::read_dir(root.join("dflockd/v1"))?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<Result<_, _>>()?;
    files.retain(|file| file.extension().is_some_and(|extension| extension == "proto"));
    files.sort();

    let mut compiler = protox::Compiler::new([root])?;
    compiler.include_imports(true).include_source_info(true).open_files(&files)?;
    tonic_prost_build::configure()
        .build_transport(false)
        .bytes(".")
        .btree_map(".")
        .compile_fds(compiler.file_descriptor_set())?;

    // What reflection tells, without the comments.
    compiler.include_source_info(false);
    let out = std::path::PathBuf::from(std::env::var_os("OUT_DIR").ok_or("no OUT_DIR")?);
    std::fs::write(out.join("dflockd.binpb"), compiler.encode_file_descriptor_set())?;
    Ok(())
}
